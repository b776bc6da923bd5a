"""Times of a training step, measured side by side: on one machine, the models make a few steps each, in turn."""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jax

from experiments.at_work import at_work
from experiments.jobs import Arm, Job, train
from experiments.measure import read_training
from experiments.records import kept, stored, this_machine

ROUNDS, STEPS = 3, 12


@dataclass(frozen=True)
class StepTimes:
    """Times of a training step of all models, on one machine.

    Attributes:
        machine: in words, with the version of JAX.
        steps: made by each model in each round; the first is not counted.
        seconds: model and width -> the median time of a step in each round.
    """

    machine: str
    steps: int
    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return max(map(len, self.seconds.values()), default=0)

    def of(self, system: str, width: int) -> list[float]:
        """Seconds, a number per round; empty if it was not timed."""
        return self.seconds.get(_name(system, width), [])


def step_times(arms: Sequence[Arm], path: Path, run_dir: Path, measures: bool) -> StepTimes | None:
    """Those at `path`, with the platform in its name, if they are of these models.

    Args:
        arms: those that are compared at the same number of steps.
        measures: make them if they are not there, by short trainings below `run_dir`, which are removed.

    Returns:
        None if there are none.
    """
    parts = {_name_of(arm): arm.recipe.raw["trainer"].get("per_device_parallelism", -1) for arm in arms}
    recipes = {_name_of(arm): _short(arm).recipe.digest() for arm in arms}
    asked = {"recipes": recipes, "rounds": ROUNDS, "parts": parts}
    path = path.with_stem(f"{path.stem}-{jax.default_backend()}")

    def make() -> StepTimes:
        with at_work(run_dir) as terminal:
            return _measured(arms, run_dir, terminal)

    return kept(path, StepTimes, asked, make) if measures else stored(path, StepTimes, asked)


def _measured(arms: Sequence[Arm], run_dir: Path, terminal: TextIO) -> StepTimes:
    seconds: dict[str, list[float]] = {_name_of(arm): [] for arm in arms}
    for number in range(1, ROUNDS + 1):
        for arm in arms:
            with tempfile.TemporaryDirectory(dir=run_dir) as folder:
                own = _short(arm, folder)
                train(own.recipe)
                took = read_training(own).seconds_per_step
            seconds[_name_of(arm)].append(took)
            print(f"round {number}/{ROUNDS}  {_name_of(arm)}  {1000 * took:.0f} ms per step", file=terminal)
            jax.clear_caches()
    machine = this_machine()
    return StepTimes(f"{machine}, JAX {machine.jax}", STEPS, seconds)


def _short(arm: Arm, run_dir: str = "") -> Job:
    """A training with few steps, and the least evaluation."""
    trainer = {"num_train_steps": STEPS, "steps_per_eval": STEPS, "max_eval_batches": 1}
    recipe = arm.recipe.but({"run_dir": run_dir, "trainer": trainer})
    return Job.of(dataclasses.replace(arm, recipe=recipe), seed=0, is_reported=False)


def _name(system: str, width: int) -> str:
    return f"{system}-d{width}"


def _name_of(arm: Arm) -> str:
    return _name(arm.what.system, arm.what.width)
