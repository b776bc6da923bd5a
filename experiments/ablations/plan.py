"""The plan of the ablations: their YAML, and the arms of all groups, each model once."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.alike import check_alike
from experiments.config import OtherDepthsConfig, check_among, check_reference
from experiments.cost import cost_of
from experiments.jobs import Arm, Place, Places
from experiments.recipes import Changes, Recipe, value_at
from experiments.texts import Text
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError, shortened

_MISSING = object()


@dataclass(frozen=True)
class Read:
    """Evaluates a trained flow with other settings, without training. solver: of the step. steps: one or several."""

    solver: str
    steps: int | list[int]

    def __post_init__(self):
        solver_by_name(self.solver)
        if not self.places or min(steps for _, steps in self.places) < 1:
            raise UserError(f"read: steps must be at least 1, or several such numbers; got {self.steps}")

    @property
    def places(self) -> list[Place]:
        numbers = self.steps if isinstance(self.steps, list) else [self.steps]
        return [(self.solver, steps) for steps in numbers]


@dataclass(frozen=True)
class Group:
    """Models that differ in one respect.

    Attributes:
        question: the question that the group answers, in words.
        arms: name -> changes merged into the configuration last; the key `base` selects another file to start from.
        reference: the arm with which the others are compared.
        base: file to start from instead of the common one. overrides: merged before the arms.
        read: other solvers and numbers of steps at which each trained model is evaluated.
        by: a key of the model in which the arms differ besides their learning rate, `weights.time_embed_dim` say: the
            table and the figure are by both.
    """

    question: str
    reference: str
    arms: dict[str, dict[str, Any]]
    base: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    read: list[Read] = field(default_factory=list)
    by: str | None = None

    @property
    def places(self) -> list[Place]:
        """The places of all evaluations, each once."""
        return list(dict.fromkeys(place for read in self.read for place in read.places))


@dataclass
class AblationsConfig(OtherDepthsConfig):
    """In addition to `OtherDepthsConfig`; a learning rate is selected for each arm:

    Attributes:
        base: configuration of train_lm that arms start from; its data is replaced by `text`.
        groups: name -> `Group`. Arms with the same model are trained once, whichever groups they are in.
        only: names of groups; others are left out, and results go to their own folder, `results_<GROUP>_...`.
    """

    base: str | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    only: list[str] | None = None

    @property
    def chosen(self) -> list[str]:
        """The names of the selected groups."""
        return list(self.groups) if self.only is None else self.only

    def results(self, runs: Path) -> Path:
        name = "results" if self.only is None else "results_" + "_".join(self.only)
        return Path(self.output) if self.output else runs / name

    def check(self) -> None:
        super().check()
        check_among("only", self.chosen, self.groups)
        for name, group in self.groups.items():
            check_reference(f"groups.{name}.reference", group.reference, group.arms, "its arms")
            if group.by and self.learning_rates:
                raise UserError(
                    f"groups.{name}.by: arms are shown by their own learning rates, but `learning_rates` gives one to"
                    " each. Leave one of them out"
                )


@dataclass(frozen=True)
class Model:
    """model: label of the trained model: the name of its first arm, and a hash of all its settings."""

    model: str


def plan(config: AblationsConfig, text: Text, run_dir: Path) -> dict[tuple[str, str], Arm]:
    """(group, arm) -> its trained model, for the selected groups. The selection does not affect its label.

    Raises:
        UserError: a configuration cannot be read, a model cannot be evaluated at one of the places, or the arms of a
            group do not read the same tokens.
    """
    known: dict[str, Arm] = {}
    of: dict[tuple[str, str], str] = {}
    for group_name, group in config.groups.items():
        shown: list[tuple[Any, float]] = []
        recipes: dict[str, Recipe] = {}
        for name, changes in group.arms.items():
            try:
                recipe = config.recipe(group.base or config.base, text, run_dir, group.overrides, changes)
                recipes[name] = recipe
                digest = recipe.digest(train=text.hash("train"), select=text.hash("select"))
                label = f"{name}-{digest}"
                if digest not in known:
                    known[digest] = Arm(label=label, recipe=recipe, cost=cost_of(recipe), what=Model(label), text=text)
                if group.by:
                    shown.append((value_of(group.by, recipe.raw["model"]), recipe.rate))
                # At the places of all groups, whichever are chosen: what is asked of a training has one record.
                known[digest] = _read_at(known[digest], group.places, config.read_batches)
                if group_name in config.chosen:
                    of[group_name, name] = digest
            except UserError as error:
                raise UserError(f"groups.{group_name}.arms.{name}: {error}") from None
        try:
            check_alike(recipes, group.reference)
        except UserError as error:
            raise UserError(f"groups.{group_name}: {error}") from None
        _check_shown(group_name, shown)
    return {key: known[digest] for key, digest in of.items()}


def _check_shown(group: str, shown: list[tuple[Any, float]]) -> None:
    """Raises:
    UserError: arms that are to be shown by a value and their rate cannot be put in order, or not told apart.
    """
    values = [value for value, _ in shown]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not are_numbers and not all(isinstance(value, str) for value in values):
        raise UserError(
            f"groups.{group}.by: the values must all be numbers, or all texts, but are {shortened(str(values))}"
        )
    if len(set(shown)) < len(shown):
        raise UserError(f"groups.{group}.by: two arms have the same value and learning rate. Leave one of them out")


def _read_at(arm: Arm, places: list[Place], read_batches: int | None) -> Arm:
    """The arm, evaluated at these places too."""
    before = arm.flow.places if arm.flow else []
    if places and not arm.recipe.is_flow:
        raise UserError("it is no flow but a model of one depth, and cannot be read at another: leave out `read`")
    together = Places(list(dict.fromkeys([*before, *places])), read_batches)
    if not together.places:
        return dataclasses.replace(arm, flow=None)
    together.check(arm.recipe.config.model.depth)
    return dataclasses.replace(arm, flow=together)


def value_of(key: str, model: Changes) -> Any:
    """The value of a key like `weights.time_embed_dim` in the configuration of a model.

    Raises:
        UserError: it is not there.
    """
    value = value_at(model, key, default=_MISSING)
    if value is _MISSING:
        raise UserError(f"`by` is {key!r}, which its `model` does not set. Name a key that all arms have")
    return value


def settings(changes: Changes, prefix: str = "") -> str:
    """The changes of an arm in one line: `model.depth.steps=12`."""
    flat = []
    for key, value in changes.items():
        nested = isinstance(value, dict) and value
        flat.append(settings(value, f"{prefix}{key}.") if nested else f"{prefix}{key}={value}")
    return ", ".join(flat)
