"""The study of continuity: arms in two widths, costs where depth grows, its rule; tables from the record alone."""

import dataclasses
import json
import math

import pytest
from support.studies import ABOUT, COUNTS, ORIGIN, refuse_work, smoke

from experiments.continuity.__main__ import STUDY
from experiments.continuity.plan import ContinuityConfig, arms
from experiments.continuity.report import Continuity, looks_of, share_of_flops, worst
from experiments.jobs import Job
from experiments.records import read
from experiments.statistics import holm, paired
from experiments.study import FOLDER
from experiments.texts import Builtin
from qkvflow.cli import parse
from qkvflow.errors import UserError


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    config, folder = smoke(STUDY), tmp_path_factory.mktemp("continuity")
    text = config.text.prepare(folder / "texts")
    rates = dict.fromkeys(config.arms, 2e-3)
    return arms(config, text, folder), arms(config, text, folder, rates)


def test_rates_are_searched_in_a_smaller_width_and_transferred(planned):
    search, own = ({arm.what.arm: arm for arm in found} for found in planned)
    assert {arm.what.width for arm in search.values()} == {16}
    begun = [arm.base or arm for arm in search.values()]  # the first stage of a stack
    assert {arm.recipe.config.model.hidden_dim for arm in begun} == {16}
    assert {arm.recipe.rate for arm in own.values()} == {float(f"{2e-3 * math.sqrt(16 / 32):.3g}")}
    assert own["generated_range"].recipe.config.optimizer.generated_scale == "sum_e"
    assert own["per_layer"].flow is None
    assert own["basis_2"].flow.places == [("euler", 2), ("euler", 4), ("euler", 8), ("rk4", 4)]
    assert own["generated_range"].flow.places == [("heun", 2), ("heun", 4), ("heun", 8), ("rk4", 4)]


@pytest.mark.parametrize(("file", "folder"), [("wikitext2", "readings"), ("solvers", "readings_solvers")])
def test_committed_readings_are_those_of_the_yaml(tmp_path, file, folder):
    """They are found again by what determined their trainings, whatever has changed in the code."""
    config = parse(ContinuityConfig, ["--config_path", str(FOLDER / "continuity" / f"{file}.yaml")])[0]
    kept = [json.loads(path.read_text()) for path in sorted((FOLDER / "continuity" / folder).glob("*.json"))]
    if not kept:
        pytest.skip("no reading is committed")
    config.only = list(dict.fromkeys(one["found"]["arm"] for one in kept))
    text = Builtin().prepare(tmp_path)  # which text it is, is not part of a recipe
    rates = dict.fromkeys(config.only, 1e-3) if config.learning_rates else {}
    known = [*arms(config, text, tmp_path), *arms(config, text, tmp_path, rates)]
    of = {(arm.what.arm, arm.what.width): arm for arm in known}
    for found, asked in ((one["found"], one["asked"]) for one in kept):
        job = Job.of(of[found["arm"], found["width"]], found["seed"], found["learning_rate"])
        assert job.recipe.digest() == asked["recipe"], job.name


def test_steps_cost_what_their_stage_costs(planned):
    own = {arm.what.arm: arm.cost for arm in planned[1]}
    fixed, growing, drawn = own["basis_2"], own["basis_2_grow"], own["generated_range"]
    assert (fixed.evaluations, growing.evaluations) == (4, 3)  # 2 for half of the training, then 4
    (_, early), (half, late) = growing.stages
    assert (half, late) == (0.5, fixed.flops)
    assert early < 0.75 * late  # half the blocks, and the head
    assert growing.flops == pytest.approx((early + late) / 2)
    assert growing.spent(3, 12) == pytest.approx(3 * early)
    assert growing.spent(9, 12) == pytest.approx(6 * early + 3 * late)
    assert growing.spent(12, 12) == pytest.approx(12 * growing.flops)
    assert drawn.evaluations == pytest.approx(2 * (2 + 3 + 4) / 3)  # Heun's method evaluates twice in a step


def test_a_stack_is_trained_in_stages_with_one_rate(planned):
    search, own = ({arm.what.arm: arm for arm in found}["per_layer_stack"] for found in planned)
    job = Job.of(search, 0, 7e-3)
    first, last = job.stages
    assert [stage.rate for stage in job.stages] == [7e-3, 7e-3]
    assert first.recipe.config.model.plan.steps == 2
    assert (last.recipe.config.steps, last.recipe.config.mode.order) == (4, "stack")
    assert last.recipe.config.run == str(first.recipe.run.path)
    assert [stage.recipe.steps for stage in job.stages] == [6, 6]
    assert [stage.recipe.config.optimizer.lr_schedule for stage in job.stages] == ["constant", "cosine"]
    assert first.name != last.name
    growing = {arm.what.arm: arm for arm in planned[1]}["per_layer"].cost
    assert own.cost.stages == [(0.0, pytest.approx(own.base.cost.flops)), (0.5, pytest.approx(growing.flops))]
    assert own.flops == pytest.approx(6 * (own.base.cost.flops + growing.flops))
    assert (own.steps, own.cost.evaluations, own.cost.parameters) == (12, 3, growing.parameters)


@pytest.mark.parametrize(
    ("arm", "stack"), [("per_layer", {0.0: 3, 0.5: 4}), ("per_layer", {0.0: 1, 0.5: 2}), ("basis_2", {0.0: 2, 0.5: 4})]
)
def test_what_is_no_stack_is_refused(tmp_path, arm, stack):
    config = smoke(STUDY)
    config.arms[arm] = config.arms[arm] | {"stack": stack}
    with pytest.raises(UserError, match=f"arms.{arm}.stack: .* a multiple of the one before"):
        arms(config, config.text.prepare(tmp_path), tmp_path)


def test_what_cannot_be_trained_is_refused(tmp_path):
    for changes, message in (
        ({"reference": "nothing"}, "not among the arms"),
        ({"only": ["basis_2", "basis_3"]}, "`only` has basis_3. Choices: per_layer"),
        ({"panels": {"one": ["nothing"]}}, "`panels.one` has nothing"),
        ({"learning_rates": [1e-3]}, "for a grid that can grow"),
        ({"only": ["per_layer"]}, "at least two arms"),
        ({"depths": [0]}, r"`depths\[0\]` must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()
    with pytest.raises(UserError, match="nothing to study"):
        ContinuityConfig().check()
    config = smoke(STUDY, layers=6)
    with pytest.raises(UserError, match="per_layer is read with 4 steps, but `layers` is 6"):
        arms(config, config.text.prepare(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"num_train_steps": 24}}, "has 24 for `trainer.num_train_steps`, and per_layer has 12"),
        ({"trainer": {"train_batch_size": 2}}, "has 2 for `trainer.train_batch_size`, and per_layer has"),
        ({"model": {"max_seq_len": 16}}, "has 16 for `train_seq_len, or model.max_seq_len`, and per_layer has 32"),
        ({"data": {"tokenizer": "char"}}, "has char for `data.tokenizer`, and per_layer has byte"),
        ({"model": {"depth": {"step_size": "residual"}}}, "cannot be read by rk4 in 4 steps: step_size: residual"),
        (
            {"model": {"type": "gpt2", "max_seq_len": 32, "num_layers": 4}},
            "has `model.type: gpt2`, a model without steps",
        ),
    ],
)
def test_an_arm_that_could_not_be_compared_is_refused_before_any_training(tmp_path, changes, message):
    config = smoke(STUDY)
    config.arms["basis_2"] = changes
    with pytest.raises(UserError, match=message):
        arms(config, config.text.prepare(tmp_path), tmp_path)


@pytest.mark.parametrize("file", ["wikitext2", "solvers"])
def test_the_studies_of_the_experiment_can_be(tmp_path, file):
    config = parse(ContinuityConfig, ["--config_path", str(FOLDER / "continuity" / f"{file}.yaml")])[0]
    config.check()
    rates = dict.fromkeys(config.arms, 1e-3) if config.learning_rates else {}
    assert len(arms(config, Builtin().prepare(tmp_path), tmp_path, rates)) == len(config.arms)


def test_all_depths_are_read_by_default():
    config = ContinuityConfig(layers=3)
    assert config.places("euler") == [*(("euler", steps) for steps in range(2, 13)), ("rk4", 3)]
    assert config.places("rk4") == [("rk4", steps) for steps in range(2, 13)]


def made_up() -> Continuity:
    """Three seeds; `smooth` solves its ODE, by Heun's method, `lost` is a stack of layers."""
    read_at, solvers = [2, 4, 8], {"per_layer": "euler", "smooth": "heun", "lost": "euler"}
    changes = {"smooth": (0.04, 0.0, 0.01, -0.015), "lost": (2.0, 0.0, 1.0, 1.5)}
    results, selection = [], []
    for seed in range(3):
        for shift, arm in enumerate(("per_layer", "smooth", "lost")):
            loss = 2.0 + 0.1 * seed + 0.01 * shift * (seed + 1)
            places = [*((solvers[arm], steps) for steps in read_at), ("rk4", 4)]
            found = [
                {"solver": s, "steps": n, "evaluations": n, "loss": loss + c, "perplexity": 1.0, "displacement": 1.0}
                for (s, n), c in zip(places, changes.get(arm, ()), strict=False)
            ]
            numbers = {"report_loss": loss, "select_loss": loss, "seconds_per_step": 0.1, "learning_rate": 1e-3}
            curve = [(5, loss + 0.5 - 0.8 * (arm == "lost")), (10, loss)]
            what = {"arm": arm, "width": 32, "solver": solvers[arm]}
            results.append({**what, "seed": seed, "curve": curve, "readings": found, **numbers})
    for rate, loss in ((1e-3, 2.2), (2e-3, 2.1), (4e-3, 2.3)):
        for arm, found in (("smooth", loss), ("lost", -rate)):
            what = {"arm": arm, "width": 16, "solver": solvers[arm]}
            selection.append({**what, "seed": 9, "learning_rate": rate, "select_loss": found})
    cost = {"parameters": 1e6, "materialised": 1e6, "evaluations": 4, "flops": 1e9, "tokens": 512, "memory": 2**20}
    costs = {arm: cost | {"stages": [(0.0, 1e9)]} for arm in ("per_layer", "smooth", "lost")}
    costs["lost"] |= {"flops": 0.75e9, "stages": [(0.0, 0.5e9), (0.5, 1e9)]}
    protocol = {"steps": 10, "layers": 4, "read_at": read_at, "seeds": [0, 1, 2], "arms": {a: {} for a in costs}}
    protocol |= {"learning_rates": [1e-3, 2e-3, 4e-3], "panels": {"all": list(costs)}}
    record = {"protocol": protocol | ABOUT, "costs": costs, "results": results, "selection": selection}
    return read(Continuity, record | ORIGIN)


def _without(trained, place):
    """Its loss there is no number."""
    own = [dataclasses.replace(r, loss=math.nan) if (r.solver, r.steps) == place else r for r in trained.readings]
    return dataclasses.replace(trained, readings=own)


def _without_any(trained):
    """None of its losses at other depths is a number."""
    return dataclasses.replace(trained, readings=[dataclasses.replace(r, loss=math.nan) for r in trained.readings])


def test_tables_and_figures_come_from_the_record_alone():
    record = made_up()
    found = {arm: line.loss for arm, line in record.lines.items()}
    by_seed = {arm: {r.seed: r.report_loss for r in record.of(arm=arm)} for arm in record.costs}
    tests = [paired(by_seed[arm], by_seed["per_layer"]).p for arm in ("smooth", "lost")]
    assert [found[arm].p_holm for arm in ("smooth", "lost")] == holm(tests)  # one family
    # The reference's mean is 2.1. `lost` is below in all seeds after 5 of 10 steps, of which each costs half.
    assert share_of_flops(record, "lost") == (3, pytest.approx(0.25))
    count, share = share_of_flops(record, "per_layer")
    assert (count, share) == (2, 1.0)
    assert record.places("smooth", 4) == [("heun", 4), ("heun", 8)]
    assert worst(record, "smooth", [*record.places("smooth", 4), ("rk4", 4)]).mean == pytest.approx(-0.015)
    assert worst(record, "smooth", record.places("smooth")).mean == pytest.approx(0.04)
    text = STUDY.filled_page(record)
    assert "Still at an edge: lost." in text
    lost = [_without(r, ("heun", 8)) if r.arm == "smooth" and r.seed == 1 else r for r in record.results]
    broken = STUDY.filled_page(dataclasses.replace(record, results=lost)).partition("## Is it an ODE?")[2]
    assert next(line for line in broken.splitlines() if line.startswith("| smooth")).endswith("| no |")
    nothing = dataclasses.replace(record, results=[_without_any(r) for r in record.results])
    assert [name for name, _ in STUDY.figures(nothing)] == ["flops", "depths"]
    rule = text.partition("## Is it an ODE?")[2].splitlines()
    ends = [line.split(" | ")[-1] for line in rule if line.startswith(("| smooth", "| lost"))]
    assert ends[:2] == ["yes |", "no |"]
    assert f"{COUNTS['2']:.3f} (n = 2)" in text
    assert len(STUDY.files(record)["summary.csv"].rows) == 3 + 2 * 4
    assert [name for name, _ in STUDY.figures(record)] == ["flops", "depths"]


def test_an_arm_looks_the_same_in_all_panels_and_unlike_those_beside_it():
    shown = {"a": list("abcdef"), "b": list("aghijk"), "c": list("bglmno")}
    looks = looks_of(shown)
    assert set(looks) == set("abcdefghijklmno")
    for own in shown.values():
        assert len({looks[arm]["color"] for arm in own}) == len(own)
    few = looks_of({"a": list("abcd"), "b": list("aefg")})
    assert len({look["color"] for look in few.values()}) == 7  # as long as there are enough
    many = looks_of({"all arms": list("abcdefghijklmnopqrstuvwxyz")})
    assert len({(look["color"], look["marker"]) for look in many.values()}) == 26


@pytest.mark.slow
def test_smoke_goes_on_from_what_was_read(tmp_path, monkeypatch):
    """With the readings alone another machine makes the same page, and trains nothing."""
    kept = tmp_path / "kept"
    first = STUDY.carry_out(smoke(STUDY, run_dir=str(tmp_path / "runs"), readings=str(kept)))
    assert len(list(kept.iterdir())) == len(first.selection) + 5 * 2
    assert len(first.selection) >= 5 * 2
    assert [r.at(("rk4", 4)).steps for r in first.results if r.readings] == [4] * 6
    stages = {"per_layer_stack": [4, 6, 10, 12]}  # a stack's curve goes through its stages, each with its own end
    for result in first.results:
        assert [step for step, _ in result.curve] == stages.get(result.arm, [4, 8, 12])
    refuse_work(monkeypatch)
    again = STUDY.carry_out(smoke(STUDY, run_dir=str(tmp_path / "other"), readings=str(kept)))
    assert (again.results, again.selection) == (first.results, first.selection)
