"""Reading trainings: only causal models, once, on any machine; and how long it will take."""

import contextlib
import dataclasses
import io
import math
from dataclasses import dataclass

import haliax as hax
import jax
import pytest
from support.studies import smoke

from experiments import measure
from experiments.compare.__main__ import STUDY
from experiments.config import RatesConfig, SeedsConfig
from experiments.cost import Cost
from experiments.jobs import Arm, Job
from experiments.leak.__main__ import Vocab, draw
from experiments.leak.model import Model
from experiments.measure import Measure, check_causality
from experiments.recipes import Recipe
from experiments.records import Training
from experiments.texts import PARTS, Text
from qkvflow.errors import UserError
from qkvflow.locks import locked
from qkvflow.training.finite import Diverged


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Trained(Training, Named):
    more: int = 0


def job(name: str, minutes: int, is_reported: bool = True, **asks) -> Job:
    raw = {"run_dir": "r", "data": {"tokenizer": "byte"}, "trainer": {"num_train_steps": minutes}, "optimizer": {}}
    raw |= {"model": {"type": "neuralode"}}
    arm = Arm(label=name, recipe=Recipe(raw), cost=Cost(1, 1, 1, 1.0, 1), what=Named(name), asks=asks)
    return Job.of(arm, 3, 0.1, is_reported)


ARMS = [job(name, 1).arm for name in "ab"]


@pytest.fixture
def trained(monkeypatch) -> tuple[list[str], io.StringIO]:
    """Names of the arms that were trained, and what was told. By a clock that only trainings move, a minute a FLOP."""
    clock, names, lines = [0.0], [], io.StringIO()

    def read(job: Job) -> Training:
        names.append(job.arm.label)
        clock[0] += 60 * job.arm.flops
        return Training(job.seed, job.rate, [(1, 1.5)], 1.5, 0.1)

    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(measure, "at_work", lambda run_dir: contextlib.nullcontext(lines))
    monkeypatch.setattr(measure, "train", lambda *recipes, lanes: None)
    monkeypatch.setattr(measure, "read_training", read)
    monkeypatch.setattr(measure, "load_run", lambda path: None)
    monkeypatch.setattr(measure, "causal_at", lambda run, name: [1])
    return names, lines


def reader(run_dir, **config) -> Measure[Trained]:
    return Measure(Trained, SeedsConfig(**config), run_dir, lambda *_: {"report_loss": 1.0, "more": 7})


def test_time_left_is_reckoned_from_what_was_trained_now(tmp_path, trained):
    reader(tmp_path).all([job("known", 30)])
    found = reader(tmp_path).all([job("known", 30), job("first", 2), job("second", 6)])
    assert found == [Trained(name, 3, 0.1, [(1, 1.5)], 1.5, 0.1, [1], 1.0, 7) for name in ("known", "first", "second")]
    assert trained[1].getvalue().splitlines()[2:] == [
        "3 trainings to report, 8 FLOPs to go",
        "1/3  known-lr0.1-seed3  loss 1.000  0 s",
        "2/3  first-lr0.1-seed3  loss 1.000  120 s, about 6 min left",
        "3/3  second-lr0.1-seed3  loss 1.000  360 s, about 0 min left",
    ]


def test_readings_alone_are_enough_and_only_for_what_they_are(tmp_path, trained, monkeypatch):
    """On another machine, which has the files but not the runs."""
    names, _ = trained
    asked = [job("a", 1), job("b", 1, is_reported=False)]
    first = reader(tmp_path / "here").all(asked)
    assert [(r.report_loss, r.causal_at, r.more) for r in first] == [(1.0, [1], 7), (None, [], 0)]
    assert names == ["a", "b"]
    elsewhere = {"readings": str(tmp_path / "here" / "readings")}
    assert reader(tmp_path / "elsewhere", **elsewhere).all(asked) == first
    assert names == ["a", "b"]
    (tmp_path / "here" / "readings" / "a-lr0.1-seed3.json").write_text('{"asked": {"reci')  # killed while it wrote
    monkeypatch.setattr(Recipe, "is_finished", property(lambda self: True))  # here, where the runs are
    for config, other in (
        ({}, job("a", 1)),
        ({}, job("a", 1, places=3)),
        ({"report_batches": 8}, job("a", 1)),
    ):
        reader(tmp_path / "here", **config).all([other])
    assert names == ["a", "b", *"aaa"]


@pytest.mark.parametrize(("rates", "used"), [([], 0.1), ([0.3], 0.3), ([0.3, 0.2], 0.2)])
def test_every_arm_is_reported_with_or_without_a_search(tmp_path, trained, monkeypatch, rates, used):
    monkeypatch.setattr(
        measure, "read_training", lambda job: Training(job.seed, job.rate, [(1, 1.0)], job.rate, seconds_per_step=0.1)
    )
    config = RatesConfig(learning_rates=rates, seeds=[1, 2], selection_seeds=[5])
    study = Measure(Trained, config, tmp_path, lambda *_: {"report_loss": 1.0})
    arms = [dataclasses.replace(arm, recipe=arm.recipe.but({"optimizer": {"learning_rate": 0.1}})) for arm in ARMS]
    found, searched = study.search_and_report(arms)
    assert [(r.name, r.seed, r.learning_rate) for r in found] == [(n, s, used) for s in (1, 2) for n in "ab"]
    assert len(searched) == (len(rates) * 2 if len(rates) > 1 else 0)


def test_what_was_told_is_not_told_again(tmp_path, trained):
    held, first = job("held", 1), job("first", 1)
    study = reader(tmp_path)
    with locked(tmp_path / "claims" / f"{held.name}.lock", wait=False):
        left = []
        dataclasses.replace(study, left_out=left).all([first, held])
    assert left == [1]
    before = len(trained[1].getvalue().splitlines())
    again = dataclasses.replace(study, again=True)
    again.all([first, held])
    again.all([first])
    assert [line.split("  ")[:2] for line in trained[1].getvalue().splitlines()[before:]] == [
        ["2 trainings to report, 1 FLOPs to go"],
        ["2/2", held.name],
    ]


def test_a_text_too_short_to_report_on_is_refused_before_any_training(tmp_path, trained):
    for part, size in (("train", 999), ("select", 99), ("report", 5)):
        (tmp_path / f"{part}.txt").write_text("x" * size)
    text = Text("short", tmp_path)
    recipe = smoke(STUDY).recipe("configs/wikitext2/neuralode.yaml", text, tmp_path / "runs")
    arm = dataclasses.replace(job("a", 1).arm, recipe=recipe, text=text)
    for is_reported in (False, True):
        with pytest.raises(UserError, match=r"the text 'short' is too short to report on: .* has \d tokens"):
            reader(tmp_path).all([Job.of(arm, 3, 0.1, is_reported)])
    assert trained[0] == []


def test_a_base_on_another_text_is_another_start(tmp_path, trained):
    names, _ = trained
    texts = []
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
        for part in PARTS:
            (tmp_path / name / f"{part}.txt").write_text(f"{name} {part} " * 200)
        texts.append(Text(name, tmp_path / name))
    recipe = smoke(STUDY).recipe("configs/wikitext2/neuralode.yaml", texts[1], tmp_path / "runs")
    plain = dataclasses.replace(job("a", 1).arm, text=texts[1], recipe=recipe)
    base = dataclasses.replace(plain, label="base", text=texts[0])
    arm = dataclasses.replace(plain, recipe=recipe.but({"mode": {"type": "full"}}), base=base)
    reader(tmp_path).all([Job.of(arm, 3, 0.1, is_reported=False)])
    (tmp_path / "source" / "train.txt").write_text("something else")
    with pytest.raises(UserError, match="with another start"):
        reader(tmp_path).all([Job.of(arm, 3, 0.1, is_reported=False)])
    assert names == ["a"]


def test_the_record_of_another_training_is_not_replaced(tmp_path, trained):
    names, _ = trained
    path = tmp_path / "readings" / "a-lr0.1-seed3.json"
    reader(tmp_path).all([job("a", 1)])
    before = path.read_text()
    with pytest.raises(UserError, match=r"a-lr0\.1-seed3\.json is the record of a training with other settings"):
        reader(tmp_path).all([job("b", 1), job("a", 2)])
    assert names == ["a"], "refused before any work"
    path.write_text(before.replace('"text": {}', '"text": {"train": "0a"}'))
    with pytest.raises(UserError, match=r"with another text\. Nothing was changed"):
        reader(tmp_path).all([job("a", 1)])
    assert path.read_text() != before


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.4])
def test_a_rate_that_diverges_is_no_choice_and_stops_no_search(tmp_path, trained, monkeypatch, rate):
    """Nor is a training repeated that diverged; one that is to be reported ends the study."""
    tried = []

    def train(*recipes, lanes):
        tried.append(recipes[0].rate)
        if recipes[0].rate >= rate:
            raise Diverged("the training loss is infinite")

    def read(job: Job) -> Training:
        return Training(job.seed, job.rate, [(1, 1.0)], 1 / job.rate, 0.1)

    monkeypatch.setattr(measure, "train", train)
    monkeypatch.setattr(measure, "read_training", read)
    config = RatesConfig(learning_rates=[0.1, 0.2, 0.4], selection_seeds=[5], beyond_grid=2)
    found, chosen = Measure(Trained, config, tmp_path).search([job("a", 1).arm])
    assert chosen == {"a": pytest.approx(rate / 2)}
    assert sum(r.select_loss is None for r in found) == sum(r >= rate for r in tried) > 0
    assert "a-lr0.4-seed5  diverged  0 s" in trained[1].getvalue()
    before = len(tried)
    assert Measure(Trained, config, tmp_path).search([job("a", 1).arm]) == (found, chosen)
    assert len(tried) == before
    with pytest.raises(Diverged):
        Measure(Trained, config, tmp_path).all([Job.of(job("a", 1).arm, 3, 0.5)])


def test_seeds_of_which_one_diverges_are_trained_one_by_one(tmp_path, trained, monkeypatch):
    made = []

    def train(*recipes, lanes):
        made.append(([recipe.raw["trainer"]["seed"] for recipe in recipes], lanes))
        if any(recipe.raw["trainer"]["seed"] == 6 for recipe in recipes):
            raise Diverged("the training loss is infinite")

    monkeypatch.setattr(measure, "train", train)
    config = RatesConfig(learning_rates=[0.1], selection_seeds=[5, 6], seeds_at_once=2)
    jobs = [Job.of(job("a", 1).arm, seed, 0.1, is_reported=False) for seed in (5, 6)]
    found = Measure(Trained, config, tmp_path).all(jobs)
    assert [(r.seed, r.select_loss is None) for r in found] == [(5, False), (6, True)]
    assert made == [([5, 6], 2), ([5], 1), ([6], 2), ([6], 1)]


def test_options_of_jax_are_those_of_each_training(tmp_path, trained, monkeypatch):
    def seen() -> str | None:
        return jax.config.jax_default_matmul_precision

    before, found = seen(), []
    monkeypatch.setattr(measure, "train", lambda *recipes, lanes: found.append(seen()))
    monkeypatch.setattr(measure, "load_run", lambda path: found.append(seen()))
    arms = [job(name, 1).arm for name in "ab"]
    options = {"trainer": {"jax_config": {"jax_default_matmul_precision": "high"}}}
    arms[0] = dataclasses.replace(arms[0], recipe=arms[0].recipe.but(options))
    reader(tmp_path).all([Job.of(arm, 3, 0.1) for arm in arms])
    assert found == [before, "high", before, before], "a training has its own, see `jobs.train`"
    assert seen() == before != "high"


def test_seeds_at_once_are_those_of_an_arm_without_readings(tmp_path, trained, monkeypatch):
    groups = []

    def train(*recipes, lanes):
        groups.append(([recipe.raw["trainer"]["id"] for recipe in recipes], lanes))

    arms = [job(name, 1).arm for name in "ab"]
    jobs = [Job.of(arm, seed, 0.1) for seed in (1, 2, 3) for arm in arms]
    monkeypatch.setattr(measure, "train", train)
    reader(tmp_path).all([jobs[2]])  # a, seed 2
    assert groups.pop() == (["a-lr0.1-seed2"], 1)
    found = reader(tmp_path, seeds_at_once=2).all(jobs)
    assert [(r.name, r.seed) for r in found] == [(name, seed) for seed in (1, 2, 3) for name in "ab"]
    assert groups == [
        (["a-lr0.1-seed1"], 2),  # as one of a group, of which the other has been measured
        (["b-lr0.1-seed1", "b-lr0.1-seed2"], 2),
        (["b-lr0.1-seed2"], 2),  # its run is finished by then
        (["a-lr0.1-seed3"], 1),
        (["b-lr0.1-seed3"], 1),
    ]


def test_a_grid_grows_while_its_best_is_at_an_edge(tmp_path, trained, monkeypatch):
    best = {"inside": 0.2, "above": 1.3, "below": 0.03, "endless": 1e9}

    def loss(job: Job) -> Training:
        return Training(job.seed, job.rate, [(1, 1.0)], abs(math.log(job.rate / best[job.arm.label])), 0.1)

    monkeypatch.setattr(measure, "read_training", loss)
    config = RatesConfig(learning_rates=[0.1, 0.2, 0.4], selection_seeds=[5, 6], beyond_grid=3)
    found, chosen = Measure(Trained, config, tmp_path).search([job(name, 1).arm for name in best])
    assert chosen == pytest.approx({"inside": 0.2, "above": 1.6, "below": 0.025, "endless": 3.2})
    tried = {name: sorted({r.learning_rate for r in found if r.name == name}) for name in best}
    assert tried["inside"] == [0.1, 0.2, 0.4]
    assert tried["above"] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    assert tried["below"] == pytest.approx([0.0125, 0.025, 0.05, 0.1, 0.2, 0.4])
    assert len(tried["endless"]) == 6
    assert len(found) == 2 * (3 + 6 + 6 + 6)


@pytest.mark.slow
def test_a_model_that_sees_the_future_is_refused():
    tokens, key = draw(jax.random.PRNGKey(0), 2), jax.random.PRNGKey(1)
    models = {leaks: Model.init(Vocab, leaks=leaks, width=16, heads=2, layers=1, key=key) for leaks in (True, False)}
    assert check_causality(models[False], tokens, "causal") == [1, 4, 7]
    with pytest.raises(UserError, match="leaky sees the future: token 1"):
        check_causality(models[True], tokens, "leaky")
    with pytest.raises(UserError, match="does not hear its input"):
        check_causality(lambda tokens: hax.zeros((*tokens.axes, Vocab)), tokens, "deaf")


def test_a_reported_training_that_diverges_stops_no_other(tmp_path, trained, monkeypatch):
    def train(*recipes, lanes):
        if recipes[0].raw["trainer"]["id"].startswith("a-"):
            raise Diverged("the training loss is infinite.")

    monkeypatch.setattr(measure, "train", train)
    with pytest.raises(Diverged, match=r"a-lr0\.1-seed3: the training loss is infinite\. 1 of the trainings to report"):
        reader(tmp_path).all([job("a", 1), job("b", 1)])
    assert trained[0] == ["b"]
    assert [path.name for path in (tmp_path / "readings").iterdir()] == ["b-lr0.1-seed3.json"]


def test_other_measurements_need_the_run(tmp_path, trained, monkeypatch):
    """Without it, its training would be made again, and its record replaced."""
    reader(tmp_path).all([job("a", 1)])
    monkeypatch.setattr(Recipe, "is_finished", property(lambda self: False))
    for study in (reader(tmp_path, report_batches=8), reader(tmp_path)):
        other = job("a", 1) if study.config.report_batches == 8 else job("a", 1, places=3)
        with pytest.raises(UserError, match=r"a-lr0\.1-seed3\.json .* other measurements \((batches|places)\)"):
            study.all([other])
    assert trained[0] == ["a"]
    monkeypatch.setattr(Recipe, "is_finished", property(lambda self: True))
    reader(tmp_path).all([job("a", 1, places=3)])
    assert trained[0] == ["a", "a"]  # measured again


def test_a_page_in_part_refuses_the_records_of_another_training(tmp_path, trained):
    reader(tmp_path).all([job("a", 1)])
    with pytest.raises(UserError, match="a training with other settings"):
        reader(tmp_path).those([job("a", 2)], trains=lambda job: False)
