"""Lines of tables of losses: what was trained under one name, its loss beside that of a reference, and its cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments import tables
from experiments.records import Training, by_seed
from experiments.statistics import Contrast, contrasts
from experiments.tables import Cell, Table


class Sized(Protocol):
    """What every study knows of a model; some know all of `cost.Cost`."""

    parameters: int
    evaluations: int | float


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        trained: a training for each seed. loss: reported, against the reference; all lines are one family of tests.
        cost: of a training step. steps: of a training.
    """

    trained: Sequence[Training]
    loss: Contrast
    cost: Sized
    steps: int = 0

    @property
    def what(self) -> Training:
        """Any training, for what all share."""
        return self.trained[0]

    @property
    def flops(self) -> float:
        """Of a training."""
        return self.cost.flops * self.steps

    def reaches(self, loss: float) -> list[tuple[int, Training]]:
        """The trainings whose loss on the part `select` comes down to `loss`, each with the step where it is there."""
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
    "peak MiB": lambda line: f"{(line.cost.memory or 0) / 2**20:.0f}",
}


def lines(
    trained: Mapping[str, Sequence[Training]], reference: str, costs: Mapping[str, Sized], steps: Mapping[str, int] = {}
) -> dict[str, Line]:
    """name -> its line."""
    losses = contrasts({name: by_seed(own) for name, own in trained.items()}, lambda name: reference)
    return {name: Line(own, losses[name], costs[name], steps.get(name, 0)) for name, own in trained.items()}


def table(first: str, found: Mapping[str, Line], *columns: Mapping[str, Callable[[Line], Cell]]) -> Table:
    """A row for each line, which begins with its name below `first`."""
    shown = {title: cell for some in columns for title, cell in some.items()}
    rows = [[name, *(cell(line) for cell in shown.values())] for name, line in found.items()]
    return Table([first, *shown], rows)


def known(*titles: str) -> dict[str, Callable[[Line], Cell]]:
    """Some of COLUMNS."""
    return {title: COLUMNS[title] for title in titles}


def against(reference: str) -> dict[str, Callable[[Line], Cell]]:
    """Columns of the loss, and of its difference to that of the reference."""
    shown: dict[str, Callable[[Line], Cell]] = {"loss": lambda line: line.loss.mean}
    shown |= {"SD": lambda line: f"{line.loss.mean.sd:.3f}"}
    titles = (f"minus {reference}", "p (Holm)", "d_z")
    return shown | {title: lambda line, k=k: tables.difference_cells(line.loss)[k] for k, title in enumerate(titles)}
