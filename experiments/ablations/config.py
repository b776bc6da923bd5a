"""What is ablated, on which text and by which rules: the YAML of the ablations."""

from dataclasses import dataclass, field
from typing import Any

from experiments.study import StudyConfig
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError


@dataclass(frozen=True)
class Read:
    """A trained flow read in another way, without training. solver: of the step. steps: one number, or several."""

    solver: str
    steps: int | list[int]

    def __post_init__(self):
        solver_by_name(self.solver)
        if not self.places or min(steps for _, steps in self.places) < 1:
            raise UserError(f"read: steps must be at least 1, or several such numbers; got {self.steps}")

    @property
    def places(self) -> list[tuple[str, int]]:
        """(solver, steps)."""
        numbers = self.steps if isinstance(self.steps, list) else [self.steps]
        return [(self.solver, steps) for steps in numbers]


@dataclass(frozen=True)
class Group:
    """Models that differ in one thing.

    question: what the group is to answer, in words.
    arms: name -> what is merged into the configuration last; `base` among it is another file to begin from.
    reference: the arm that the others are compared with.
    base: file to begin from instead of that of all groups. overrides: merged before the arms.
    read: other solvers and numbers of steps at which each trained model is read.
    """

    question: str
    reference: str
    arms: dict[str, dict[str, Any]]
    base: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    read: list[Read] = field(default_factory=list)

    @property
    def places(self) -> list[tuple[str, int]]:
        """(solver, steps) of all readings, each once."""
        return list(dict.fromkeys(place for read in self.read for place in read.places))


@dataclass
class AblationsConfig(StudyConfig):
    """Besides what `StudyConfig` says; a learning rate is chosen for each arm:

    base: configuration of train_lm that arms begin from; its data is replaced by `text`.
    groups: name -> `Group`. Arms that are the same model are trained once, in whichever groups they stand.
    only: names of groups, as a list or with commas between; others are left out, and results go to a folder of their
        own, `results_<GROUP>_...`.
    read_batches: of how many batches of the part `report` readings in other ways are; as `report_batches` if null.
    """

    base: str | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    only: str | list[str] | None = None
    read_batches: int | None = None

    @property
    def chosen(self) -> list[str]:
        """The names of the groups to be made."""
        names = self.only.split(",") if isinstance(self.only, str) else self.only
        return list(self.groups) if names is None else [name.strip() for name in names]

    def check(self) -> None:
        """Errors: `UserError` for what cannot be ablated, before any work."""
        unknown = [name for name in self.chosen if name not in self.groups]
        if unknown or not self.chosen:
            raise UserError(f"`only` has {', '.join(unknown) or 'nothing in it'}. Choices: {', '.join(self.groups)}")
        for name, group in self.groups.items():
            arms = ", ".join(group.arms) or "none"
            if group.reference not in group.arms:
                raise UserError(f"groups.{name}.reference is {group.reference!r}, which is not among its arms ({arms})")
            if len(group.arms) < 2:
                raise UserError(f"groups.{name}.arms: a comparison needs at least two arms, and it has {arms}")
            for arm, changes in group.arms.items():
                if not (changes.get("base") or group.base or self.base):
                    raise UserError(
                        f"groups.{name}.arms.{arm} has no configuration to begin from: give `base: FILE` to it, to its"
                        " group or to all"
                    )
        super().check()
