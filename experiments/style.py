"""How figures look: colours, lines and marks of series, chosen in one place; curves, points and files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.statistics import Interval, interval

Named = tuple[str, Figure]


@dataclass(frozen=True)
class Style:
    """The k-th series of a figure has the k-th of these, in turn.

    colours, marks, lines. ordered: colour map of series that are a quantity, such as depth.
    """

    colours: Sequence[Any] = tuple(f"C{k}" for k in range(10))
    marks: Sequence[str] = ("o", "s", "^", "D", "v", "*", "P", "x")
    lines: Sequence[str] = ("-", "--", ":", "-.")
    ordered: str = "viridis"
    reference: str = "black"
    muted: str = "grey"


STYLE = Style()  # of all figures


def colour(k: int) -> Any:
    return STYLE.colours[k % len(STYLE.colours)]


def mark(k: int) -> str:
    return STYLE.marks[k % len(STYLE.marks)]


def line(k: int) -> str:
    return STYLE.lines[k % len(STYLE.lines)]


def shades(count: int) -> list[Any]:
    """Colours of `count` series in their order."""
    return [plt.get_cmap(STYLE.ordered)(0.9 * k / max(count - 1, 1)) for k in range(count)]


def panels(rows: int, columns: int, size: tuple[float, float], dpi: int = 150, **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels, an array [rows, columns]. dpi: of its PNG."""
    return plt.subplots(rows, columns, figsize=size, dpi=dpi, squeeze=False, layout="constrained", **options)


def curve(panel: Axes, x: Sequence[float], own: Sequence[Interval], alpha: float = 0.15, **style: Any) -> None:
    """Means as a line, their intervals as a band."""
    means, halves = np.array([i.mean for i in own]), np.array([i.half for i in own])
    panel.plot(x, means, **style)
    low = means - halves
    if panel.get_yscale() == "log":  # which has no room below zero
        low = np.maximum(low, means / 10)
    panel.fill_between(x, low, means + halves, color=style["color"], alpha=alpha, linewidth=0)


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[Interval]]:
    """Steps, and at each the mean of the curves: [step, value] of each seed."""
    own = [dict(one) for one in curves]
    steps = sorted(own[0])
    return steps, [interval([one[step] for one in own]) for step in steps]


def points(panel: Axes, x: Sequence[float], own: Sequence[Interval], **style: Any) -> None:
    """Means with bars for their intervals."""
    panel.errorbar(x, [i.mean for i in own], yerr=[i.half for i in own], capsize=3, **style)


def finish(panel: Axes, legend: float | None = None, **labels: Any) -> None:
    """Labels, a grid, and a legend in letters of this size."""
    panel.set(**labels)
    panel.grid(alpha=0.3)
    if legend is not None:
        panel.legend(fontsize=legend)


def arms(panel: Axes, names: Sequence[str], rotation: float = 20) -> None:
    """Names of arms below a panel, at 0, 1, ..."""
    panel.set_xticks(range(len(names)), names, rotation=rotation, ha="right", fontsize=8)


def save(figures: Iterable[Named], folder: Path) -> None:
    """PNG for pages, PDF for papers."""
    for name, figure in figures:
        for ending in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{ending}")
        plt.close(figure)
