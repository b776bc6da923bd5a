"""Rows of tables of losses: the trainings under one name, their loss compared with a reference, and their cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments import tables
from experiments.records import Training, by_seed
from experiments.statistics import Contrast, contrasts
from experiments.tables import Cell, Table


class Sized(Protocol):
    """What every study knows about a model; some know all of `cost.Cost`."""

    parameters: int
    evaluations: int | float


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        trained: one training per seed. loss: reported, against the reference; all lines are one family of tests.
        cost: of a training step. steps: of a training.
    """

    trained: Sequence[Training]
    loss: Contrast
    cost: Sized
    steps: int = 0

    @property
    def what(self) -> Training:
        """Any of the trainings, for what they have in common."""
        return self.trained[0]

    @property
    def flops(self) -> float:
        """FLOPs of a training."""
        return self.cost.flops * self.steps

    def reaches(self, loss: float) -> list[tuple[int, Training]]:
        """The trainings whose loss on the part `select` falls to `loss`, each with the step at which it does."""
        found = [(r.reaches(loss), r) for r in self.trained]
        return [(step, r) for step, r in found if step is not None]


COLUMNS: dict[str, Callable[[Line], Cell]] = {
    "width": lambda line: line.what.width,
    "steps": lambda line: line.steps,
    "trained": lambda line: tables.count(line.cost.parameters),
    "materialised": lambda line: tables.count(line.cost.materialised),
    "evaluations": lambda line: f"{line.cost.evaluations:g}",
    "FLOPs": lambda line: f"{line.flops:.3g}",
    "rate": lambda line: f"{line.what.learning_rate:g}",
    "ms per step": lambda line: tables.milliseconds(r.seconds_per_step for r in line.trained),
    "peak MiB": lambda line: "" if line.cost.memory is None else f"{line.cost.memory / 2**20:.0f}",
}


def lines(
    trained: Mapping[str, Sequence[Training]],
    reference: str,
    costs: Mapping[str, Sized],
    steps: Mapping[str, int] = {},
    planned: int = 0,
) -> dict[str, Line]:
    """name -> its line. planned: size of the family of tests, if some are missing."""
    losses = contrasts({name: by_seed(own) for name, own in trained.items()}, lambda name: reference, planned)
    return {name: Line(own, losses[name], costs[name], steps.get(name, 0)) for name, own in trained.items()}


def table(first: str, found: Mapping[str, Line], *columns: Mapping[str, Callable[[Line], Cell]]) -> Table:
    """One row per line, with its name in the column `first`."""
    shown = {title: cell for some in columns for title, cell in some.items()}
    rows = [[name, *(cell(line) for cell in shown.values())] for name, line in found.items()]
    return Table([first, *shown], rows)


def known(*titles: str) -> dict[str, Callable[[Line], Cell]]:
    """Some of COLUMNS."""
    return {title: COLUMNS[title] for title in titles}


def against(reference: str) -> dict[str, Callable[[Line], Cell]]:
    """Columns for the loss, and for its difference to that of the reference."""
    shown: dict[str, Callable[[Line], Cell]] = {"loss": lambda line: line.loss.mean}
    shown |= {"SD": lambda line: tables.number(line.loss.mean.sd, ".3f")}
    titles = (f"minus {reference}", "p (Holm)", "d_z")
    return shown | {title: lambda line, k=k: tables.difference_cells(line.loss)[k] for k, title in enumerate(titles)}
