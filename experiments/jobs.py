"""Trainings of a study: each is a run, so that a restarted study continues where it stopped."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.cost import Cost, cost_of
from experiments.recipes import Recipe
from experiments.texts import Text
from qkvflow import finetune_lm, train_lm
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import differences, listed, read_config
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.runs import data_record
from qkvflow.runs.base import BaseRecord
from qkvflow.runs.config import FREE_KEYS, FinetuneConfig, TrainConfig
from qkvflow.runs.prepare import PreparedRun
from qkvflow.training.finetune import settle
from qkvflow.training.levanter_config import jax_configured
from qkvflow.training.start import FromBase, FromScratch, Start
from qkvflow.training.together import train_together

# Settings in which an existing run may differ. The location of its data does not matter (its content is compared); the
# number and size of its evaluations do, since its losses come from them.
_OF_EVALUATIONS = {"steps_per_eval", "max_eval_batches", "per_device_eval_parallelism"}
_FREE_KEYS = {*FREE_KEYS, "data.train", "data.validation"} - {f"trainer.{key}" for key in _OF_EVALUATIONS}


Place = tuple[str, int]  # solver, steps
Rates = Mapping[Hashable, float]  # group of arms -> learning rate


@dataclass(frozen=True)
class Places:
    """Where a flow is evaluated. read_batches: number of batches of the part `report`; None: as for all losses."""

    places: list[Place]
    read_batches: int | None = None

    def check(self, depth: DepthConfig) -> None:
        """Raises: UserError: a flow of this depth cannot be evaluated at one of them."""
        for solver, steps in self.places:
            try:
                depth.on_grid(steps, solver=solver)
            except UserError as error:
                raise UserError(f"it cannot be read by {solver} in {steps} steps: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is trained, with several seeds.

    Attributes:
        label: identifies it among the runs. recipe: without name, seed and selected learning rate.
        cost: of a training step. what: a dataclass that describes it; its fields come first in the trainings' records.
        text: for training, selection and report; None if the study handles these in its own way.
        flow: where its trained flow is evaluated without training; None for nowhere.
        asks: other measurements of its trainings, as data: if it changes, they are measured again.
        shares_rate: arms with equal values share their learning rate; None shares with none.
        base: the arm whose training with the same seed is the starting point; a stage of the same training if they
            share their rate. Then `cost` is that of a mean step of all stages.
    """

    label: str
    recipe: Recipe
    cost: Cost
    what: Any
    text: Text | None = None
    flow: Places | None = None
    asks: Mapping[str, object] = field(default_factory=dict)
    shares_rate: Hashable = None
    base: "Arm | None" = None

    @property
    def group(self) -> Hashable:
        return self.label if self.shares_rate is None else self.shares_rate

    @property
    def steps(self) -> int:
        """Of a training, with its earlier stages."""
        earlier = self.base is not None and self.base.group == self.group
        return self.recipe.steps + (self.base.steps if self.base and earlier else 0)

    @property
    def flops(self) -> float:
        """FLOPs of a training."""
        return self.cost.flops * self.steps


@dataclass(frozen=True)
class System:
    """system: the name of what is trained."""

    system: str

    @staticmethod
    def arms(recipes: Mapping[str, Recipe], text: Text, asks: Mapping[str, object]) -> list[Arm]:
        """One for each of the recipes."""
        more = {"text": text, "asks": asks}
        return [Arm(label=name, recipe=r, cost=cost_of(r), what=System(name), **more) for name, r in recipes.items()]


@dataclass(frozen=True)
class Job:
    """One training. `is_reported`: false if it only serves to select a learning rate."""

    arm: Arm
    seed: int
    rate: float
    is_reported: bool
    recipe: Recipe

    @staticmethod
    def of(arm: Arm, seed: int, rate: float | None = None, is_reported: bool = True) -> "Job":
        """rate: by default that of the recipe."""
        rate = arm.recipe.rate if rate is None else rate
        words = f"{rate:g}".replace("+", "")  # 1e+06: names of runs cannot have a plus
        trainer = {"id": f"{arm.label}-lr{words}-seed{seed}", "seed": seed}
        recipe = arm.recipe.but({"trainer": trainer, "optimizer": {"learning_rate": rate}})
        job = Job(arm, seed, rate, is_reported, recipe)
        if job.base is None:
            return job
        return dataclasses.replace(job, recipe=recipe.but({"run": str(job.base.recipe.run.path)}))

    @property
    def base(self) -> "Job | None":
        """The training that it starts from, with the same rate if it is an earlier stage."""
        base = self.arm.base
        if base is None:
            return None
        return Job.of(base, self.seed, self.rate if base.group == self.arm.group else None, self.is_reported)

    @property
    def stages(self) -> list["Job"]:
        """The parts of the training in their order; one, unless it has stages."""
        base = self.base
        return [*(base.stages if base and base.arm.group == self.arm.group else []), self]

    @property
    def name(self) -> str:
        return self.recipe.raw["trainer"]["id"]


def selection(arms: Sequence[Arm], rates: Sequence[float], seeds: Sequence[int]) -> list[Job]:
    """Trainings for the selection of learning rates; none if there is no choice.

    Of arms in the same group, which differ only in their number of steps, the first one determines the rate.
    """
    first = {arm.group: arm for arm in reversed(arms)}
    searched = [arm for arm in arms if first[arm.group] is arm and len(rates) > 1]
    return [Job.of(arm, seed, rate, is_reported=False) for arm in searched for seed in seeds for rate in rates]


def reported(arms: Sequence[Arm], seeds: Sequence[int], rates: Mapping[Hashable, float] = {}) -> list[Job]:
    """The reported trainings, seed by seed."""
    return [Job.of(arm, seed, rates.get(arm.group)) for seed in seeds for arm in arms]


def at_once(jobs: Sequence[Job], seeds: int) -> dict[str, list[Job]]:
    """name -> the trainings that are made together with it, itself included: those of the same arm and rate, in groups
    of up to `seeds` different seeds."""
    alike: dict[Hashable, list[Job]] = {}
    for job in {job.name: job for job in jobs}.values():
        alike.setdefault((job.arm.label, job.rate, job.is_reported), []).append(job)
    groups = (own[i : i + seeds] for own in alike.values() for i in range(0, len(own), seeds))
    return {job.name: group for group in groups for job in group}


def train(*recipes: Recipe, lanes: int = 1) -> None:
    """Trains or resumes runs, without output. Finished ones stay unchanged.

    Args:
        lanes: if more than one, the runs differ by their seed alone, and are trained as one program with so many lanes.

    Raises:
        UserError: an existing run, finished or not, has other settings or another text; or these cannot be trained
            together.
    """
    for recipe in recipes:
        _check_is_same(recipe)
    left = [recipe for recipe in recipes if not recipe.is_finished]
    groups = [left] if lanes > 1 and left else [[recipe] for recipe in left]
    for group in groups:
        configs = [recipe.config_here for recipe in group]
        with jax_configured(configs[0].trainer), contextlib.redirect_stdout(io.StringIO()):
            if lanes > 1:
                _train_together(configs, lanes)
            else:
                (finetune_lm if isinstance(configs[0], FinetuneConfig) else train_lm).main(configs[0])


def _train_together(configs: Sequence[TrainConfig], lanes: int) -> None:
    with quiet_libraries() as quiet:
        for trained in train_together([_with_start(config) for config in configs], quiet, lanes):
            if trained.exit_status:  # of a signal, so that of all
                raise SystemExit(trained.exit_status)


def _with_start(config: TrainConfig) -> tuple[TrainConfig, Callable[[PreparedRun], Start]]:
    """The configuration, completed, and where its model comes from."""
    if not isinstance(config, FinetuneConfig):
        return config, FromScratch.of
    settled, base, mode = settle(config)
    return settled, functools.partial(FromBase.of, base=base, mode=mode)


def _check_is_same(recipe: Recipe) -> None:
    run, given = recipe.run, recipe.config_here
    if not run.config.is_file():
        return
    if isinstance(given, FinetuneConfig):
        given, base, _ = settle(given)  # including what it inherits from its base
        if (record := BaseRecord.read(run)) is not None:
            record.check(base, base.load())
    stored = read_config(run.config, type(given))
    given = dataclasses.replace(given.settled(), vocab_size=given.vocab_size or stored.vocab_size)
    changes = differences(stored.settled(stored), given, _FREE_KEYS)
    sizes = [one.trainer.per_device_eval_parallelism for one in (stored, given)]
    if {*sizes} == {-1, recipe.batch / given.trainer.data_axis_size}:  # the default, and the same written out
        changes.pop("trainer.per_device_eval_parallelism", None)
    data = given.data.resolve(run.tokenizer, given.control_dim).record
    changes |= {f"data: {name}": change for name, change in data_record.changes(run.data, data).items()}
    if changes:
        raise UserError(
            f"the run {run.path} was made with other settings:\n{listed(changes)}\nNothing was changed. Give another"
            " --run_dir, or remove this one if its runs are not needed"
        )
