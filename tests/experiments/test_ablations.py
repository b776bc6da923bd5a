"""The ablations: arms are configurations, each model is trained once, and numbers come from the record alone."""

import dataclasses
import json
import math

import pytest
from support.studies import ABOUT, ORIGIN, refuse_work, smoke

from experiments.ablations.__main__ import STUDY
from experiments.ablations.plan import AblationsConfig, Read, plan, settings
from experiments.ablations.report import Ablations, by_rate, draw, files, readings
from experiments.jobs import Places
from experiments.records import read
from experiments.statistics import holm, paired
from experiments.study import FOLDER
from qkvflow.cli import parse
from qkvflow.errors import UserError

ARMS = {"a": {}, "b": {"model": {"depth": {"step_size": "residual"}}}}


def planned(config, tmp_path):
    return plan(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def made_up() -> Ablations:
    """Three seeds of two models, read at two places; what seeds share is 0.1 seed."""

    def result(model, seed, extra):
        loss = 2.0 + 0.1 * seed + extra
        shared = {"solver": "euler", "perplexity": 1.0, "displacement": 1.5}
        at = [{"steps": steps, "evaluations": steps, "loss": loss + steps / 10} for steps in (3, 6)]
        numbers = {"report_loss": loss, "seconds_per_step": 0.1, "learning_rate": 1e-3}
        return {"model": model, "seed": seed, "readings": [shared | place for place in at], **numbers}

    extra = {"a-0": (0.0, 0.0, 0.0), "b-1": (0.3, 0.2, 0.25)}
    results = [result(model, seed, more[seed]) for seed in range(3) for model, more in extra.items()]
    results[-1]["readings"][1]["loss"] += 0.1  # only here does the third seed differ more
    arms = {arm: {"model": model, "settings": s} for arm, model, s in (("one", "a-0", ""), ("two", "b-1", "x=1"))}
    about = {"question": "Why?", "reference": "one", "begins": "base=f.yaml", "arms": arms}
    groups = {"first": about | {"places": [["euler", 3], ["euler", 6]]}, "second": about | {"places": []}}
    protocol = {"steps": [10], "seeds": [0, 1, 2], "read_batches": 2, "groups": groups}
    model = {"parameters": 1000, "evaluations": 6, "config": {}}
    models = {"a-0": model, "b-1": model}
    return read(Ablations, {"protocol": protocol | ABOUT, "models": models, "results": results, **ORIGIN})


def test_numbers_come_from_the_record_alone():
    record = made_up()
    found = {arm: line.loss for arm, line in record.group("second").items()}
    assert found["one"].difference is None
    by_hand = paired({0: 2.3, 1: 2.3, 2: 2.45}, {0: 2.0, 1: 2.1, 2: 2.2})
    assert (found["two"].difference.mean, found["two"].difference.p) == pytest.approx((by_hand.mean, by_hand.p))
    assert found["two"].p_holm == found["two"].difference.p  # one test alone
    at = readings(record, "first")
    tests = [at[("euler", steps), "two"].difference.p for steps in (3, 6)]
    assert tests[0] != tests[1]
    assert [at[("euler", steps), "two"].p_holm for steps in (3, 6)] == holm(tests)  # one family
    assert at[("euler", 6), "two"].difference.mean == pytest.approx(0.25 + 0.1 / 3)
    text = STUDY.filled_page(record)
    assert text.count("| two | 1.0k | 6 | 0.001 | 2.350 ± 0.215 | 0.087 | 0.250 ± 0.124 |") == 2
    assert "first 1,024 tokens" in text
    assert text.count("Loss by solver and number of evaluation steps") == 1
    assert len(files(record)["summary.csv"].rows) == 2 * 2 + 2 * 2
    assert len(files(record)["runs.csv"].rows) == 6


def test_the_page_says_whose_best_rate_is_at_an_edge():
    record = made_up()
    one = record.results[0]
    losses = {"a-0": {1e-3: 2.0, 3e-3: 1.9, 1e-2: 2.1}, "b-1": {1e-3: 2.0, 3e-3: 2.1, 1e-2: 2.2}}
    selection = [
        dataclasses.replace(one, model=model, learning_rate=rate, curve=[(1, loss)], select_loss=loss)
        for model, own in losses.items()
        for rate, loss in own.items()
    ]
    protocol = dataclasses.replace(record.protocol, learning_rates=[1e-3, 3e-3, 1e-2], beyond_grid=2)
    text = STUDY.filled_page(dataclasses.replace(record, protocol=protocol, selection=selection))
    assert "0.001, 0.003, 0.01, and of up to 2 more while the best is at an edge, with the lowest" in text
    assert "for each arm. Still at an edge: first.two. The model after" in text
    assert "edge" not in STUDY.filled_page(record)


def test_arms_of_one_name_in_two_groups_are_two():
    record = made_up()
    one, protocol = record.results[0], record.protocol
    second = protocol.groups["second"]
    arms = second.arms | {"two": dataclasses.replace(second.arms["two"], model="c-2")}
    more = [dataclasses.replace(r, model="c-2") for r in record.results if r.model == "b-1"]
    losses = {"a-0": (2.0, 1.9, 2.1), "b-1": (2.0, 2.1, 2.2), "c-2": (2.0, 1.9, 2.1)}
    rates = [1e-3, 3e-3, 1e-2]
    selection = [
        dataclasses.replace(one, model=model, learning_rate=rate, select_loss=loss)
        for model, own in losses.items()
        for rate, loss in zip(rates, own, strict=True)
    ]
    groups = protocol.groups | {"second": dataclasses.replace(second, arms=arms)}
    protocol = dataclasses.replace(protocol, learning_rates=rates, beyond_grid=2, groups=groups)
    models = record.models | {"c-2": record.models["b-1"]}
    results = record.results + more
    record = dataclasses.replace(record, protocol=protocol, selection=selection, models=models, results=results)
    assert "Still at an edge: first.two. " in STUDY.filled_page(record)


def test_arms_that_differ_in_a_key_and_in_their_rate_are_shown_by_both():
    arms = {f"{dim}_{rate:g}": (dim, rate) for rate in (3e-3, 1e-3) for dim in (16, 4)}
    models = {arm: {"weights": {"dim": dim}} for arm, (dim, _) in arms.items()}
    at = {"solver": "euler", "steps": 3, "evaluations": 3, "perplexity": 1.0}
    results = [
        {"model": arm, "seed": seed, "report_loss": dim + 100 * rate + seed, "seconds_per_step": 0.1}
        | {"learning_rate": rate, "readings": [at | {"loss": 1.0, "displacement": dim * rate * (seed + 1)}]}
        for arm, (dim, rate) in arms.items()
        for seed in (0, 2)
    ]
    asked = {"question": "?", "reference": "4_0.001", "begins": "", "places": [["euler", 3]], "by": "weights.dim"}
    asked |= {"arms": {arm: {"model": arm, "settings": ""} for arm in arms}}
    protocol = {"steps": [10], "seeds": [0, 2], "read_batches": 2, "groups": {"g": asked}} | ABOUT
    known = {arm: {"parameters": 1, "evaluations": 6, "config": config} for arm, config in models.items()}
    record = read(Ablations, {"protocol": protocol, "models": known, "results": results, **ORIGIN})
    assert by_rate(record, "g") == {
        "dim 4": {1e-3: "4_0.001", 3e-3: "4_0.003"},
        "dim 16": {1e-3: "16_0.001", 3e-3: "16_0.003"},
    }
    text = STUDY.filled_page(record)
    means = [line for line in text.splitlines() if line.startswith(("| dim 4", "| dim 16"))]
    assert [line.split(" ± ")[0] for line in means] == [
        "| dim 4 | 5.100",
        "| dim 16 | 17.100",
        "| dim 4 | 0.008",
        "| dim 16 | 0.032",
    ]
    assert "Loss by solver" not in text
    assert [name for name, _ in draw(record)] == ["g"]


@pytest.mark.parametrize("by", [None, "depth.steps"])
def test_a_model_that_diverged_leaves_the_figures_their_axes(by):
    """Its losses and displacements are no numbers, at every place."""
    record = made_up()
    for result in (r for r in record.results if r.model == "b-1"):
        lost = {"loss": math.nan, "displacement": math.inf}
        result.readings[:] = [dataclasses.replace(at, **lost) for at in result.readings]
    models = {name: dataclasses.replace(m, config={"depth": {"steps": name}}) for name, m in record.models.items()}
    groups = {"first": dataclasses.replace(record.protocol.groups["first"], by=by)}
    protocol = dataclasses.replace(record.protocol, groups=groups)
    ((_, figure),) = draw(dataclasses.replace(record, protocol=protocol, models=models))
    figure.draw_without_rendering()
    if by:
        assert figure.axes[1].get_ylim() == (0.75, 3.0)  # of the other, 1.5
    else:
        assert figure.axes[2].images[0].get_clim() == pytest.approx((2.4, 2.7))


def test_what_cannot_be_ablated_is_refused(tmp_path):
    group = {"question": "?", "reference": "a", "arms": ARMS}
    for changes, message in (
        ({"only": ["nothing"]}, "Choices: time_generated, sharing, time_sampling"),
        ({"groups": {"g": group | {"reference": "c"}}}, "g.reference is 'c', which is not among its arms"),
        ({"groups": {"g": group | {"arms": {"a": {}}}}}, "at least two arms"),
        (
            {"groups": {"g": group | {"by": "depth.steps"}}, "learning_rates": [1e-3, 2e-3]},
            "by: arms are shown by their own",
        ),
        (
            {"groups": {"g": group | {"by": "depth.steps"}}, "learning_rates": [1e-3]},
            "by: arms are shown by their own",
        ),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()
    with pytest.raises(UserError, match=r"groups.time_generated.arms.varying: a configuration .* is missing"):
        planned(smoke(STUDY, base=None), tmp_path)
    with pytest.raises(UserError, match=r"groups.g.arms.a: `by` is 'weights.dims', which its `model` does not set"):
        planned(smoke(STUDY, groups={"g": group | {"by": "weights.dims"}}), tmp_path)
    with pytest.raises(UserError, match=r"groups.g.arms.b: it cannot be read by heun in 3 steps: step_size: residual"):
        planned(smoke(STUDY, groups={"g": group | {"read": [{"solver": "heun", "steps": 3}]}}), tmp_path)
    others = {"a": {}, "b": {"trainer": {"train_batch_size": 2}}}
    with pytest.raises(UserError, match=r"groups.g: b has 2 for `trainer.train_batch_size`, and a has 8"):
        planned(smoke(STUDY, groups={"g": group | {"arms": others}}), tmp_path)
    unlike = {"a": {"model": {"depth": {"steps": 2}}}, "b": {"model": {"depth": {"steps": {"min": 2, "max": 3}}}}}
    with pytest.raises(UserError, match=r"groups.g.by: the values must all be numbers, or all texts, but are \[2, "):
        planned(smoke(STUDY, groups={"g": group | {"arms": unlike, "by": "depth.steps"}}), tmp_path)
    twice = {"a": {}, "b": {"model": {"depth": {"solver": "heun"}}}}
    with pytest.raises(UserError, match="two arms have the same value and learning rate"):
        planned(smoke(STUDY, groups={"g": group | {"arms": twice, "by": "depth.steps"}}), tmp_path)
    with pytest.raises(UserError, match="nothing to study"):
        STUDY.carry_out(AblationsConfig())
    with pytest.raises(UserError, match="at least 1"):
        Read("euler", [3, 0])
    assert Read("euler", [3, 6]).places == [("euler", 3), ("euler", 6)]


def test_the_same_arm_is_the_same_run_whatever_is_chosen(tmp_path):
    arms = {"plain": {}, "explicit": {"model": {"depth": {"steps": 6}}}, "deep": {"model": {"depth": {"steps": 12}}}}
    group = {"question": "?", "arms": arms, "read": [{"solver": "euler", "steps": 3}]}
    groups = {"first": group | {"reference": "plain"}, "second": group | {"reference": "deep", "read": []}}
    every, some = (planned(smoke(STUDY, groups=groups, only=only), tmp_path) for only in (None, ["second"]))
    assert every["first", "plain"] is every["first", "explicit"] is every["second", "plain"]
    assert len({arm.label for arm in every.values()}) == 2
    assert {name: every["first", name].cost.evaluations for name in arms} == {"plain": 6, "explicit": 6, "deep": 12}
    assert {arm.label for arm in some.values()} == {arm.label for arm in every.values()}
    assert every["first", "plain"].flow == Places([("euler", 3)], 2)
    assert some["second", "plain"].flow == Places([("euler", 3)], 2), "else each choice would measure it again"
    assert not any("report.txt" in json.dumps(arm.recipe.raw) for arm in every.values())


def test_what_an_arm_changes_in_words():
    assert settings({"base": "f", "model": {"depth": {"steps": 3}, "weights": {}}}) == (
        "base=f, model.depth.steps=3, model.weights={}"
    )


@pytest.mark.slow
def test_the_groups_of_the_experiment_ask_what_they_say(tmp_path):
    words = ["--config", str(FOLDER / "ablations" / "wikitext2.yaml"), "--text", "{type: builtin}"]
    config = parse(AblationsConfig, words)[0]
    config.check()
    of = planned(config, tmp_path)
    assert len({arm.label for arm in of.values()}) == 16
    assert set(of) == {(name, arm) for name, group in config.groups.items() for arm in group.arms}
    assert {of["solver", arm].cost.evaluations for arm in config.groups["solver"].arms} == {12}
    assert of["time_sampling", "jitter"].cost.evaluations == 7
    assert of["time_sampling", "range"].cost.evaluations == 7  # of 3, 6, 12
    for group in ("time_generated", "time_modulated"):
        sizes = [of[group, arm].cost.parameters for arm in ("varying", "frozen", "constant")]
        assert sizes[0] == sizes[1] > sizes[2]
    assert of["time_generated", "varying"] is of["initial_scale", "matched"]


@pytest.mark.slow
def test_the_smoke_test_makes_every_artefact_and_then_trains_nothing(tmp_path, monkeypatch):
    config = smoke(STUDY, run_dir=str(tmp_path), only=["time_sampling"])
    before = STUDY.carry_out(config)
    output = tmp_path / "results_time_sampling"
    names = {"results.json", "results.md", "summary.csv", "runs.csv", "time_sampling.png", "time_sampling.pdf"}
    assert {path.name for path in output.iterdir()} == names
    assert [len(r.readings) for r in before.results] == [3] * 4
    assert all(r.causal_at for r in before.results)
    refuse_work(monkeypatch)
    after = STUDY.carry_out(config)
    assert dataclasses.replace(after, command=before.command, date=before.date) == before
