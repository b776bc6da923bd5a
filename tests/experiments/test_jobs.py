"""Trainings of studies: rates are chosen apart from what is reported; a run is taken only for what it is."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from support.training import parameters

from experiments import jobs
from experiments.cost import Cost
from experiments.jobs import Arm, Job, at_once, reported, selection
from experiments.recipes import Recipe
from experiments.records import Training
from experiments.search import best, beyond, tried
from experiments.texts import Builtin
from qkvflow.data.tokenizers import load_tokenizer
from qkvflow.errors import UserError
from qkvflow.runs.prepare import prepare_run

SMALL = {"model": {"hidden_dim": 16, "max_seq_len": 16}, "trainer": {"num_train_steps": 2}}


def recipe(name: str, tmp_path) -> Recipe:
    text = Builtin().prepare(tmp_path / "texts")
    found = Recipe.of(f"configs/wikitext2/{name}.yaml", SMALL).on(text, tmp_path / "runs", 2, 1)
    return found.but({"trainer": {"id": "one", "seed": 1}})


def arm(label: str, steps: int = 10, **more) -> Arm:
    raw = {"run_dir": "r", "trainer": {"num_train_steps": steps}, "optimizer": {"learning_rate": 0.5}}
    return Arm(label=label, recipe=Recipe(raw), cost=Cost(1, 1, 1, 1.0, 1), what=None, **more)


def test_learning_rates_are_chosen_apart_from_what_is_reported():
    """Arms that differ in their number of steps alone share a rate, which the first one settles."""
    arms = [arm("a"), arm("a-longer", 20, shares_rate="a"), arm("b")]
    searched = selection(arms, [1e-3, 1e-2], [7, 8])
    assert [(one.arm.label, one.seed, one.rate) for one in searched] == [
        (label, seed, rate) for label in ("a", "b") for seed in (7, 8) for rate in (1e-3, 1e-2)
    ]
    assert not any(one.is_reported for one in searched)
    found = reported(arms, [1, 2], {"a": 1e-3, "b": 1e-2})
    assert [(one.arm.label, one.seed) for one in found] == [(a.label, seed) for seed in (1, 2) for a in arms]
    assert [one.rate for one in found[:3]] == [1e-3, 1e-3, 1e-2]
    assert len({one.name for one in searched + found}) == len(searched) + len(found)
    assert selection(arms, [1e-3], [7]) == []
    assert {one.rate for one in reported(arms, [1], {})} == {0.5}


def test_the_best_rate_has_the_lowest_mean_loss_and_a_grid_grows_at_its_edge():
    def losses(*each: tuple[float, float]):
        return tried(Training(seed, rate, select_loss=loss) for seed, (rate, loss) in enumerate(each))

    assert losses((1e-2, 2.0), (1e-3, 1.0), (1e-2, 3.0)) == {1e-3: 1.0, 1e-2: 2.5}
    assert best(losses((1e-2, 1.0), (1e-3, 1.0))) == 1e-3, "of equals the lower one"
    assert beyond(losses((1e-3, 1.0), (2e-3, 2.0), (8e-3, 3.0))) == pytest.approx(5e-4)
    assert beyond(losses((1e-3, 3.0), (2e-3, 2.0), (8e-3, 1.0))) == pytest.approx(3.2e-2)
    assert beyond(losses((1e-3, 3.0), (2e-3, 1.0), (8e-3, 2.0))) is None
    assert beyond(losses((1e-4, 2.0), (2e-4, 1.0))) == 4e-4 != 2e-4 * 2e-4 / 1e-4, "without an error of rounding"
    assert beyond(losses((0.003, 2.0), (0.01, 1.0))) == 0.03333333333333333, "as in committed readings"


def test_seeds_of_the_same_arm_and_rate_go_together():
    arms = [arm("a"), arm("b")]
    jobs = [*selection(arms[:1], [1e-3, 1e-2], [7, 8]), *reported(arms, [1, 2, 3], {"a": 1e-3, "b": 1e-3})]
    groups = at_once(jobs, 2)
    assert set(groups) == {job.name for job in jobs}
    found = [[(job.arm.label, job.rate, job.seed) for job in group] for group in groups.values()]
    assert sorted(map(tuple, found)) == sorted(
        tuple((label, rate, seed) for seed in seeds)
        for label, rate, seeds, times in (
            ("a", 1e-3, (7, 8), 2),
            ("a", 1e-2, (7, 8), 2),
            ("a", 1e-3, (1, 2), 2),
            ("a", 1e-3, (3,), 1),
            ("b", 1e-3, (1, 2), 2),
            ("b", 1e-3, (3,), 1),
        )
        for _ in range(times)
    )
    assert all(len(group) == 1 for group in at_once(jobs, 1).values())


def test_what_begins_from_another_arm_begins_from_its_run_of_the_same_seed():
    base = arm("base")
    found = Job.of(arm("tuned", base=base), 3)
    assert found.recipe.raw["run"] == str(Job.of(base, 3).recipe.run.path)
    assert found.recipe.raw["run"].endswith("base-lr0.5-seed3")


def finished(given: Recipe) -> None:
    """The run of a recipe as training leaves it, but for its parameters."""
    with prepare_run(given.config) as run:
        data = run.config.data.resolve(run.directory.tokenizer, run.config.control_dim)
        run.check_data(data.record)
        run.config = dataclasses.replace(run.config, vocab_size=len(load_tokenizer(run.directory.tokenizer)))
        run.commit()
    checkpoint = given.run.checkpoints / f"step-{given.steps - 1}"
    checkpoint.local.mkdir(parents=True)
    checkpoint.write("metadata.json", b"{}")


def test_a_finished_run_is_taken_only_for_what_it_is(tmp_path, monkeypatch):
    """Not with other settings, not evaluated otherwise, not on another text in the same place; moved it is the same."""
    given = recipe("standard", tmp_path)
    finished(given)
    assert given.is_finished
    monkeypatch.setattr(jobs.train_lm, "main", lambda config: pytest.fail("a finished run was trained again"))
    jobs.train(given)
    jobs.train(given.but({"trainer": {"checkpointer": {"save_interval": "9m"}}}))
    jobs.train(given.but({"trainer": {"per_device_parallelism": 1}}))  # evaluated as before
    for changed in (
        {"trainer": {"train_batch_size": 4}},
        {"trainer": {"num_train_steps": 1}},
        {"trainer": {"steps_per_eval": 1}},
        {"trainer": {"max_eval_batches": 3}},
        {"trainer": {"per_device_eval_parallelism": 1}},
        {"optimizer": {"learning_rate": 0.5}},
    ):
        with pytest.raises(UserError, match="was made with other settings"):
            jobs.train(given.but(changed))
    moved = Builtin().prepare(tmp_path / "elsewhere")
    jobs.train(given.but({"data": {"train": moved.file("train"), "validation": moved.file("select")}}))
    with open(given.raw["data"]["train"], "a") as file:
        file.write("one line more\n")
    with pytest.raises(UserError, match=r"train\.txt: .* before, .* now"):
        jobs.train(Recipe(given.raw))


def test_options_of_jax_hold_for_one_training(tmp_path, monkeypatch):
    given, found = recipe("standard", tmp_path), []
    monkeypatch.setattr(jobs.train_lm, "main", lambda config: found.append(jax.config.jax_default_matmul_precision))
    before = jax.config.jax_default_matmul_precision
    precise = given.but({"trainer": {"id": "precise", "jax_config": {"jax_default_matmul_precision": "high"}}})
    jobs.train(given, precise, given.but({"trainer": {"id": "after"}}))
    assert found == [before, "high", before]
    assert jax.config.jax_default_matmul_precision == before != "high"
    with pytest.raises(UserError, match="JAX does not take jax_no_such_option"):
        jobs.train(given.but({"trainer": {"jax_config": {"jax_no_such_option": 1}}}))


@pytest.mark.slow
def test_so_is_a_finished_fine_tune(tmp_path, monkeypatch):
    """What it takes over from its base is not asked for again."""
    base = recipe("neuralode", tmp_path)
    jobs.train(base)
    tuned = {key: value for key, value in base.raw.items() if key not in ("model", "weight_decay_on")}
    tuned |= {"run": str(base.run.path), "steps": 3, "mode": {"type": "lora"}}
    tuned = Recipe(tuned).but({"trainer": {"id": "tuned"}})
    jobs.train(tuned)
    assert tuned.is_finished
    monkeypatch.setattr(jobs.finetune_lm, "main", lambda config: pytest.fail("a finished run was trained again"))
    jobs.train(Recipe(tuned.raw))
    for changed in ({"steps": 4}, {"mode": {"r": 2}}):
        with pytest.raises(UserError, match="was made with other settings"):
            jobs.train(tuned.but(changed))
    shutil.rmtree(base.run.path)
    jobs.train(base.but({"trainer": {"seed": 7}}))
    with pytest.raises(UserError, match="is not the base that this run was made from"):
        jobs.train(Recipe(tuned.raw))


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_of_lanes")
def test_trainings_and_fine_tunes_of_several_seeds_together(tmp_path, monkeypatch):
    """They are finished runs like any other, and each fine-tune has its own base."""
    optimizer = {"optimizer": {"epsilon": 1e-6}}  # see tests/training/test_together.py
    base = recipe("neuralode", tmp_path).but(optimizer)
    tuned = {key: value for key, value in base.raw.items() if key not in ("model", "weight_decay_on")}
    tuned = Recipe(tuned | {"steps": 3, "mode": {"type": "lora", "dropout": 0.1}})

    def named(given: Recipe, name: str, seed: int, **more) -> Recipe:
        return given.but({"trainer": {"id": f"{name}{seed}", "seed": seed}}, more)

    jobs.train(*(named(base, "base", seed) for seed in (1, 2)), lanes=2)
    together = [named(tuned, "tuned", seed, run=str(tmp_path / "runs" / f"base{seed}")) for seed in (1, 2)]
    jobs.train(*together, lanes=2)
    assert all(one.is_finished for one in together)
    jobs.train(*together, lanes=2)
    for seed, one in zip((1, 2), together, strict=True):
        alone = named(one, "alone", seed)
        jobs.train(alone)
        for got, want in zip(parameters(one.run.path), parameters(alone.run.path), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
