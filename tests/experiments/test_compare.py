"""The comparison: equal where it says so, blind to the text it reports on, the same again after being killed."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from support.studies import ABOUT, ORIGIN, ROOT, smoke

from experiments import style
from experiments.compare.__main__ import STUDY
from experiments.compare.clock import at_time
from experiments.compare.plan import CompareConfig, arms, recipes
from experiments.compare.record import Comparison, by_row
from experiments.compare.report import files, losses, reached
from experiments.cost import cost_of, with_memory
from experiments.jobs import Job, reported, selection
from experiments.records import read
from experiments.statistics import holm, paired
from experiments.study import FOLDER
from experiments.texts import Builtin
from qkvflow.cli import parse
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError
from qkvflow.training import session


def made_up(seeds=(1, 2, 3)) -> Comparison:
    """Losses 2.0 for the reference and 2.1 for the other, plus a part that seeds share."""
    cost = {"parameters": 1e6, "materialised": 1e6, "evaluations": 6, "flops": 1e9, "tokens": 512, "memory": 2**20}
    about = {"rows": ["iso_step", "iso_flop"], "width": 32, "steps": 10, "learning_rate": 1e-3, "seconds_per_step": 0.1}
    results = [
        about
        | {
            "system": name,
            "seed": seed,
            "curve": [[5, 3.0], [10, base + 0.1 * seed]],
            "report_loss": base + 0.1 * seed + 0.01 * (seed == 3) * (name == "b_c"),
        }
        for seed in seeds
        for name, base in (("a", 2.0), ("b_c", 2.1))
    ]
    protocol = {"systems": {"a": "a.yaml", "b_c": "b.yaml"}, "reference": "a", "rows": ["iso_step", "iso_flop"]}
    protocol |= {"steps": 10, "seeds": list(seeds), "targets": [2.25, 1.0]}
    costs = {"a-d32-s10": cost, "b_c-d32-s10": cost}
    return read(Comparison, {"protocol": protocol | ABOUT, "costs": costs, "results": results, **ORIGIN})


def test_tables_come_from_the_record_alone():
    record = made_up()
    reference, other = by_row(record)["iso_step"].values()
    assert reference.loss.difference is None
    assert reference.loss.mean.mean == pytest.approx(2.2)
    own = [{r.seed: r.report_loss for r in record.results if r.system == name} for name in ("b_c", "a")]
    assert other.loss.difference == paired(*own)
    assert other.loss.p_holm == holm([other.loss.difference.p])[0]
    there, never = (reached(record, other, target) for target in record.protocol.targets)
    assert there == {"n": 1, "steps": 10, "seconds": pytest.approx(1.0), "flops": 1e10}  # the first of three seeds
    assert never["n"] == 0
    text = STUDY.filled_page(record)
    assert "not reached" in text
    assert "10, 1, 1e+10 (1 of 3 seeds)" in text
    assert text.count("| b_c | 32 |") == 2
    made = files(record)
    assert r"b\_c & 32" in made["table.tex"]
    assert len(made["summary.csv"].rows) == 4
    assert len(made["runs.csv"].rows) == 6


def test_where_depth_grows_the_first_steps_cost_less():
    record = made_up()
    ended = [dataclasses.replace(r, select_loss=r.curve[-1][1]) for r in record.results]
    record = dataclasses.replace(record, results=ended)
    assert set(at_time(record)) == {"a", "b_c"}
    growing = dataclasses.replace(record.costs["b_c-d32-s10"], flops=1e9, stages=[(0.0, 0.5e9), (0.5, 1.5e9)])
    record = dataclasses.replace(record, costs=record.costs | {"b_c-d32-s10": growing})
    found = reached(record, by_row(record)["iso_step"]["b_c"], 3.0)  # after 5 of 10 steps
    assert (found["steps"], found["flops"]) == (5, 2.5e9)
    assert math.isnan(found["seconds"])
    assert set(at_time(record)) == {"a"}


def test_memory_is_that_of_the_division_of_the_batch(tmp_path):
    config = smoke(STUDY)
    text, small = config.text.prepare(tmp_path / "texts"), {"model": {"depth": {"steps": 1}}}
    whole = config.recipe(next(iter(config.systems.values())), text, tmp_path, small)
    parts = whole.but({"trainer": {"per_device_parallelism": 1}})
    found = [with_memory(cost_of(own), own, tmp_path / "x.json").memory for own in (whole, parts)]
    assert found[1] < found[0]
    again = parts.but({"trainer": {"seed": 9, "num_train_steps": 9}, "optimizer": {"learning_rate": 9.0}})
    assert with_memory(cost_of(again), again, tmp_path / "x.json", compiles=False).memory == found[1]
    for key, value in (("mp", "p=f32,c=bfloat16"), ("model_averaging", {"type": "ema", "beta": 0.9})):
        other = parts.but({"trainer": {key: value}})
        assert with_memory(cost_of(other), other, tmp_path / "x.json", compiles=False).memory is None
    assert [path.name for path in tmp_path.glob("x*")] == ["x-cpu.json"]
    assert with_memory(cost_of(whole), whole, tmp_path / "x.json", compiles=False).memory is None


def test_what_cannot_be_compared_is_refused():
    for changes, message in (
        ({"reference": "nothing"}, "not among `systems`"),
        ({"rows": ["iso_nothing"]}, "Choices: iso_step"),
        ({"seeds": [1]}, "at least two"),
        ({"learning_rates": [1e-3, 1e-2], "selection_seeds": [1]}, "must be others than `seeds`"),
        ({"learning_rates": [1e-3, 1e-2], "selection_seeds": [5, 5]}, "each once, but are \\[5, 5\\]"),
        (
            {
                "check_rates": {"arms": ["standard"], "factors": [1.0, 1.0, 2.0]},
                "search_width": 32,
                "learning_rates": [1e-3, 1e-2],
            },
            "factors` must be positive, 1 and others, each once",
        ),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()
    with pytest.raises(UserError, match="nothing to study: give --config FILE"):
        STUDY.carry_out(CompareConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"num_train_steps": 5}}, "other: `trainer.num_train_steps` is given, but the rows determine it"),
        ({"trainer": {"seed": 5}}, "other: `trainer` has seed, which a study sets itself (by `seeds`)"),
        ({"data": {"train": "x.txt"}}, "other: `data` has train, but a study trains on its texts"),
        ({"base": "configs/finetune/quickstart_full.yaml"}, "other: it is a fine-tune"),
        ({"mode": {"type": "full"}, "run": "runs/one"}, "other: it is a fine-tune"),
        ({"model": {"max_seq_len": 32}}, "other has 32 for `train_seq_len, or model.max_seq_len`, and standard has 64"),
        ({"trainer": {"train_batch_size": 2}}, "other has 2 for `trainer.train_batch_size`"),
        ({"trainer": {"per_device_eval_parallelism": 1}}, "other has 1 for `trainer.per_device_eval_parallelism`"),
        ({"data": {"tokenizer": "char"}}, "other has char for `data.tokenizer`"),
        ({"trainer": {"train_batch_size": [{"start": 0, "value": 8}]}}, "`trainer.train_batch_size` is ["),
        ({"trainer": {"train_batch_size": -1, "per_device_parallelism": 2}}, "`trainer.train_batch_size` is -1, but"),
        ({"trainer": {"max_eval_batches": 3}}, "has max_eval_batches, which a study sets itself (by `select_batches`)"),
        ({"trainer": 5}, "`trainer` must be a mapping"),
        ({"data": "x.txt"}, "`data` must be a mapping"),
        ({"base": 5}, "`base` is 5: give the name of a YAML file"),
    ],
)
def test_an_arm_that_could_not_be_compared_is_refused(changes, message, tmp_path):
    config = smoke(STUDY, arms={"other": changes}, base="configs/wikitext2/neuralode.yaml")
    with pytest.raises(UserError, match=re.escape(message)):
        arms(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def test_so_is_a_fine_tune_of_all(tmp_path):
    fine_tune = {"mode": {"type": "full"}, "run": "runs/one"}
    config = smoke(STUDY, overrides=smoke(STUDY).overrides | fine_tune)
    with pytest.raises(UserError, match="it is a fine-tune"):
        arms(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def test_batches_of_several_sizes_have_no_cost(tmp_path):
    schedule = {"trainer": {"train_batch_size": [{"start": 0, "value": 8}, {"start": 5, "value": 16}]}}
    config = smoke(STUDY, overrides=smoke(STUDY).overrides | schedule)
    with pytest.raises(UserError, match=r"is \[.*Give one positive number"):
        arms(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def test_an_arm_has_no_rate_beside_the_search(tmp_path):
    """It would be replaced, and the page would show it."""
    config = smoke(STUDY, overrides={"optimizer": {"learning_rate": 1e-2}}, learning_rates=[1e-3])
    with pytest.raises(UserError, match="`learning_rates` determines the rate of each arm"):
        arms(config, config.text.prepare(tmp_path / "texts"), tmp_path)


def test_a_family_does_not_depend_on_what_is_done():
    record = made_up()
    systems = record.protocol.systems | {"c": "c.yaml", "d": "d.yaml"}
    record = dataclasses.replace(record, protocol=dataclasses.replace(record.protocol, systems=systems))
    loss = by_row(record)["iso_step"]["b_c"].loss
    assert loss.p_holm == pytest.approx(min(1.0, 3 * loss.difference.p))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    config = smoke(STUDY, learning_rates=[1e-3, 1e-2])
    return config, arms(config, config.text.prepare(folder / "texts"), folder)


@pytest.mark.slow
def test_rows_are_equal_in_what_they_say(planned):
    _, found = planned
    reference = found[0]
    assert reference.what.rows == ["iso_step", "iso_flop", "iso_parameter"]
    by_row = {row: {arm.what.system: arm for arm in found if row in arm.what.rows} for row in reference.what.rows}
    assert {len(systems) for systems in by_row.values()} == {6}
    assert {arm.what.steps for arm in by_row["iso_step"].values()} == {reference.what.steps}
    for arm in by_row["iso_flop"].values():
        # Either to the nearest step, or within the 5 % for which no other number of steps is trained.
        off = 0.053 if arm.what.steps == reference.what.steps else 0.5 / arm.what.steps + 1e-9
        assert arm.flops == pytest.approx(reference.flops, rel=off)
    labels = {row: [arm.label for arm in systems.values()] for row, systems in by_row.items()}
    assert len(set(labels["iso_flop"]) - set(labels["iso_step"])) >= 2  # models of quite another price
    for arm in by_row["iso_parameter"].values():
        assert arm.cost.parameters == pytest.approx(reference.cost.parameters, rel=0.3)  # a step in width is much here
    assert len({arm.label for arm in found}) == len(found)


@pytest.mark.slow
def test_no_training_knows_the_text_that_is_reported(planned):
    config, found = planned
    every = selection(found, config.learning_rates, config.selection_seeds) + reported(found, config.seeds)
    assert not any("report.txt" in json.dumps(job.recipe.raw) for job in every)
    assert len({job.name for job in every}) == len(every)


@pytest.mark.parametrize("path", sorted((FOLDER / "compare").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_comparison_can_be(path, tmp_path):
    """Each system on another text than that of the comparison, which may not be here."""
    config = parse(CompareConfig, ["--config_path", str(path)])[0]
    config.check()
    assert len(set(config.text.parts.values())) == 3
    looks = style.series_of(config.names).values()
    assert len({look["color"] for look in looks}) == len(config.names), "systems of the same colour"
    text = Builtin().prepare(tmp_path / "texts")
    assert {recipe.config.model.hidden_dim > 0 for recipe in recipes(config, text, tmp_path).values()} == {True}


@pytest.mark.slow
def test_the_order_of_the_text_depends_on_the_seed_alone(planned, monkeypatch):
    """The first batches that train_lm hands to each model, taken where it hands them."""
    _, found = planned
    seen = {}

    class Enough(Exception):
        pass

    def capture(run, trainer, Pos, key, opened=session.open_corpus):
        corpus = opened(run, trainer, Pos, key)
        sequences = [corpus.train.as_sync_dataset()[i] for i in range(24)]
        seen[current] = np.stack([s.tokens.array if hasattr(s.tokens, "array") else s.tokens for s in sequences])
        raise Enough

    monkeypatch.setattr(session, "open_corpus", capture)
    for arm in (arm for arm in found if "iso_step" in arm.what.rows):
        for seed in (1, 2):
            current = (arm.what.system, seed)
            with quiet_libraries() as quiet, pytest.raises(Enough):
                session.train_run(Job.of(arm, seed, 1e-3).recipe.config, lambda run: None, quiet)
    assert len(seen) == 12
    for name, seed in seen:
        np.testing.assert_array_equal(seen[name, seed], seen["standard", seed])
    assert not np.array_equal(seen["standard", 1], seen["standard", 2])


@pytest.mark.slow
def test_killed_half_way_it_comes_to_the_same_table(tmp_path):
    """And the same seed gives the same losses, bit for bit: both experiments are made from nothing. Then the readings
    alone, on another machine as it were, give the table too."""
    settings = yaml.safe_load((FOLDER / "compare" / "smoke.yaml").read_text())
    settings["systems"] = {"standard": settings["systems"]["standard"]}
    settings |= {"rows": ["iso_step"], "learning_rates": [1e-3, 1e-2], "evaluations": 2}
    settings["overrides"]["trainer"]["num_train_steps"] = 8
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings))

    def start(name: str, *more: str) -> subprocess.Popen:
        words = ["-m", "experiments.compare", "--config", str(file), "--run_dir", str(tmp_path / name), *more]
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def lines_of(pattern: str) -> int:
        return sum(len(path.read_text().splitlines()) for path in (tmp_path / "killed").glob(pattern))

    assert start("whole").wait() == 0
    killed = start("killed")
    # The first training has been read, the second is under way.
    while killed.poll() is None:
        if lines_of("readings/*.json") >= 1 and lines_of("*/metrics.jsonl") >= 8 + 3:
            break
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert lines_of("readings/*.json") < 4
    assert start("killed").wait() == 0
    assert start("elsewhere", "--readings", str(tmp_path / "whole" / "readings")).wait() == 0
    assert not list((tmp_path / "elsewhere").glob("standard-*")), "what was read elsewhere was trained again"
    whole, *others = (
        read(Comparison, json.loads((tmp_path / name / "results" / "results.json").read_text()))
        for name in ("whole", "killed", "elsewhere")
    )
    for other in others:
        assert losses(other) == losses(whole)
        for first, second in zip(whole.results + whole.selection, other.results + other.selection, strict=True):
            assert vars(first) | {"seconds_per_step": 0} == vars(second) | {"seconds_per_step": 0}
