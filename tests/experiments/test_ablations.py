"""The ablations: arms are configurations, each model is trained once, and numbers come from the JSON alone."""

import json
from pathlib import Path

import pytest
import yaml

from experiments import jobs
from experiments.ablations import figures, tables
from experiments.ablations.__main__ import SMOKE, main
from experiments.ablations.config import AblationsConfig, Read
from experiments.ablations.plan import settings, variants
from experiments.ablations.summary import evaluations, lines, read
from experiments.statistics import holm, paired_test
from experiments.systems import merged
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig

ROOT = Path(__file__).parents[2]
WIKITEXT2 = ROOT / "experiments" / "ablations" / "wikitext2.yaml"


def smoke(**changes) -> AblationsConfig:
    return decode(AblationsConfig, yaml.safe_load(SMOKE.read_text()) | changes)


def planned(config, tmp_path):
    return variants(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def made_up_record() -> dict:
    """As `results.json`: three arms of two models, read at two places; what seeds share is 0.1 seed."""

    def result(model, seed, extra):
        loss = 2.0 + 0.1 * seed + extra
        readings = [
            {"solver": "euler", "steps": steps, "evaluations": steps, "loss": loss + steps / 10, "displacement": 1.5}
            for steps in (3, 6)
        ]
        numbers = {"curve": [[10, loss]], "select_loss": loss, "report_loss": loss, "seconds_per_step": 0.1}
        return {"model": model, "seed": seed, "learning_rate": 1e-3, "causal_at": [1], "readings": readings, **numbers}

    extra = {"a-0": (0.0, 0.0, 0.0), "b-1": (0.3, 0.2, 0.25)}
    results = [result(model, seed, more[seed]) for seed in range(3) for model, more in extra.items()]
    for place in (0, 1):  # only here does the third seed differ more
        results[-1]["readings"][place]["loss"] += 0.1 * place
    arms = {arm: {"model": model, "settings": s} for arm, model, s in (("one", "a-0", ""), ("two", "b-1", "x=1"))}
    about = {"question": "Why?", "reference": "one", "begins": "base=f.yaml", "arms": arms}
    protocol = {
        "text": "t",
        "parts": {"train": "one", "select": "two", "report": "three"},
        "bytes": {"train": 1, "select": 1, "report": 1},
        "tokenizer": "byte",
        "seeds": [0, 1, 2],
        "learning_rates": [1e-3],
        "selection_seeds": [0],
        "tokens_per_step": 512,
        "select_batches": None,
        "report_batches": None,
        "counts": {"1": 3.25, "2": 2.75},
        "read_batches": 2,
        "steps": [10],
        "groups": {"first": about | {"places": [["euler", 3], ["euler", 6]]}, "second": about | {"places": []}},
    }
    model = {"parameters": 1000, "evaluations": 6, "config": {}}
    origin = {"machine": {"device": "d", "cores": 2, "jax": "0"}, "date": "2026-01-01", "command": "c"}
    record = {"protocol": protocol, "models": {"a-0": model, "b-1": model}, "results": results, "selection": []}
    return json.loads(json.dumps(record | origin))


def test_numbers_come_from_the_json_alone(tmp_path):
    record = made_up_record()
    one, two = lines(record, "second")
    assert one.loss.difference is None
    assert two.loss.difference.mean == pytest.approx(0.25)
    test = paired_test({0: 2.3, 1: 2.3, 2: 2.45}, {0: 2.0, 1: 2.1, 2: 2.2})
    assert two.loss.test.p == pytest.approx(test.p)
    assert two.loss.p_holm == two.loss.test.p  # one test alone
    found = read(record, "first")
    tests = [found[("euler", steps), "two"].test.p for steps in (3, 6)]
    assert tests[0] != tests[1]
    assert [found[("euler", steps), "two"].p_holm for steps in (3, 6)] == holm(tests)  # one family
    assert found[("euler", 6), "two"].difference.mean == pytest.approx(0.25 + 0.1 / 3)
    assert evaluations(record, "first") == {("euler", 3): 3, ("euler", 6): 6}
    text = tables.markdown(record)
    assert text.count("| two | 1.0k | 6 | 0.001 | 2.350 ± 0.215 | 0.087 | 0.250 ± 0.124 |") == 2
    assert "first 1,024 tokens" in text
    assert text.count("read by solver") == 1
    tables.write_csv(record, tmp_path / "summary.csv", tmp_path / "runs.csv")
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1 + 2 * 2 + 2 * 2
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 1 + 6


@pytest.mark.slow
def test_figures_come_from_the_json_alone(tmp_path):
    figures.draw(made_up_record(), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == ["first", "second"]


def test_what_cannot_be_ablated_is_refused(tmp_path):
    arms = {"a": {}, "b": {"model": {"depth": {"step_size": "residual"}}}}
    group = {"question": "?", "reference": "a", "arms": arms}
    for changes, message in (
        ({"only": "nothing"}, "Choices: time_generated, sharing, time_sampling"),
        ({"groups": {"g": group | {"reference": "c"}}}, "g.reference is 'c', which is not among its arms"),
        ({"groups": {"g": group | {"arms": {"a": {}}}}}, "at least two arms"),
        ({"base": None}, "time_generated.arms.varying has no configuration"),
        ({"seeds": [1]}, "at least two different"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(**changes).check()
    with pytest.raises(UserError, match=r"b cannot be read by heun in 3 steps: step_size: residual"):
        planned(smoke(groups={"g": group | {"read": [{"solver": "heun", "steps": 3}]}}), tmp_path)
    with pytest.raises(UserError, match="nothing to ablate"):
        main(AblationsConfig())
    with pytest.raises(UserError, match="at least 1"):
        Read("euler", [3, 0])
    assert Read("euler", [3, 6]).places == [("euler", 3), ("euler", 6)]


def test_the_same_arm_is_the_same_run_whatever_is_chosen(tmp_path):
    arms = {"plain": {}, "explicit": {"model": {"depth": {"steps": 6}}}, "deep": {"model": {"depth": {"steps": 12}}}}
    group = {"question": "?", "arms": arms, "read": [{"solver": "euler", "steps": 3}]}
    groups = {"first": group | {"reference": "plain"}, "second": group | {"reference": "deep", "read": []}}
    every = planned(smoke(groups=groups), tmp_path)
    assert [v.arms for v in every] == [
        (("first", "plain"), ("first", "explicit"), ("second", "plain"), ("second", "explicit")),
        (("first", "deep"), ("second", "deep")),
    ]
    assert [v.evaluations for v in every] == [6, 12]
    some = planned(smoke(groups=groups, only="second"), tmp_path)
    assert [v.label for v in some] == [v.label for v in every]
    assert [(v.places, w.places) for v, w in zip(some, every, strict=True)] == [((), (("euler", 3),))] * 2
    for v in every:
        assert "report.txt" not in json.dumps(v.raw)
        decode(TrainConfig, v.raw)


def test_an_arm_of_another_type_keeps_nothing_of_the_old_one():
    base = {"weights": {"type": "generated", "init": "official"}, "depth": {"steps": 6}}
    assert merged(base, {"weights": {"init": "matched"}})["weights"] == {"type": "generated", "init": "matched"}
    assert merged(base, {"weights": {"type": "constant"}}) == {"weights": {"type": "constant"}, "depth": {"steps": 6}}
    assert settings({"base": "f", "model": {"depth": {"steps": 3}, "weights": {}}}) == (
        "base=f, model.depth.steps=3, model.weights={}"
    )


@pytest.mark.slow
def test_the_groups_of_the_experiment_ask_what_they_say(tmp_path):
    config = parse(AblationsConfig, ["--config", str(WIKITEXT2), "--text", "{type: builtin}"])[0]
    config.check()
    found = planned(config, tmp_path)
    assert len(found) == 16
    of = {arm: v for v in found for arm in v.arms}
    assert set(of) == {(name, arm) for name, group in config.groups.items() for arm in group.arms}
    assert {of["solver", arm].evaluations for arm in config.groups["solver"].arms} == {12}
    assert of["time_sampling", "jitter"].evaluations == 7
    assert of["time_sampling", "range"].evaluations == 7  # of 3, 6, 12
    for group in ("time_generated", "time_modulated"):
        sizes = [of[group, arm].cost.parameters for arm in ("varying", "frozen", "constant")]
        assert sizes[0] == sizes[1] > sizes[2]
    assert of["time_generated", "varying"] is of["initial_scale", "matched"]


@pytest.mark.slow
def test_the_smoke_test_makes_every_artefact_and_then_trains_nothing(tmp_path, monkeypatch):
    config = smoke(run_dir=str(tmp_path), only="time_sampling")
    main(config)
    output = tmp_path / "results_time_sampling"
    names = {"results.json", "results.md", "summary.csv", "runs.csv", "time_sampling.png"}
    assert {path.name for path in output.iterdir()} == names
    before = json.loads((output / "results.json").read_text())
    assert [len(r["readings"]) for r in before["results"]] == [3] * 4
    assert all(r["causal_at"] for r in before["results"])

    def fails(*args, **kwargs):
        raise AssertionError("a finished run was trained or read again")

    monkeypatch.setattr(jobs, "train_lm", fails)
    monkeypatch.setattr(jobs, "evaluator_on", fails)
    main(config)
    after = json.loads((output / "results.json").read_text())
    assert after["results"] == before["results"]
