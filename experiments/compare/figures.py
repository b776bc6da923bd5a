"""Figures of the comparison, from its JSON alone; error bars are confidence intervals over seeds."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments.compare.config import ROWS
from experiments.compare.summary import Line, Record, lines, select
from experiments.statistics import interval

# Rows that share a training lie upon each other: later ones are larger, and hollow.
MARKERS = {
    row: {"marker": marker, "markersize": size, "fillstyle": fill, "linestyle": "none"}
    for row, marker, size, fill in zip(ROWS, "os^", (5, 8, 12), ("full", "none", "none"), strict=True)
}


def draw(record: Record, folder: Path) -> None:
    """Writes `loss.png`, `efficiency.png`, `speed.png` and `memory.png`."""
    for name, figure in (
        ("loss", loss(record)),
        ("efficiency", efficiency(record)),
        (
            "speed",
            _bars(record, "ms per training step", lambda line: (1000 * line.seconds.mean, 1000 * line.seconds.half)),
        ),
        ("memory", _bars(record, "peak MiB of a training step", lambda line: (line.cost["memory"] / 2**20, 0.0))),
    ):
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def loss(record: Record) -> Figure:
    """Left: loss on the part `select` while training, in the first row. Right: reported losses in all rows."""
    found, colours = lines(record), _colours(record)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    first = found[0].row
    for line in (line for line in found if line.row == first):
        curves = [dict(r["curve"]) for r in select(record, row=first, system=line.system)]
        steps = sorted(curves[0])
        own = [interval([curve[step] for curve in curves]) for step in steps]
        left.plot(steps, [i.mean for i in own], color=colours[line.system], label=line.system)
        low, high = zip(*(i.bounds for i in own), strict=True)
        left.fill_between(steps, low, high, color=colours[line.system], alpha=0.15, linewidth=0)
    left.set(xlabel="steps", ylabel="loss on the text to select by (nats per token)", title=f"at {ROWS[first]}")
    left.legend(fontsize=8)
    _points(
        right, found, lambda line: list(colours).index(line.system) + 0.2 * (list(ROWS).index(line.row) - 1), colours
    )
    right.set_xticks(range(len(colours)), list(colours), rotation=20, ha="right", fontsize=8)
    right.set(ylabel="reported loss (nats per token)", title=f"n = {found[0].loss.n} seeds, 95 % intervals")
    _legend_of_rows(figure, found)
    return figure


def efficiency(record: Record) -> Figure:
    """Reported loss against trained parameters and against FLOPs of the training, in all rows."""
    found, colours = lines(record), _colours(record)
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    for panel, key, words in (
        (panels[0], "parameters", "trained parameters"),
        (panels[1], "flops_in_all", "FLOPs of the training"),
    ):
        _points(panel, found, lambda line, key=key: line.cost[key], colours)
        panel.set(xscale="log", xlabel=words)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("reported loss (nats per token)")
    for system, colour in colours.items():
        panels[0].plot([], [], "o", color=colour, label=system)
    panels[0].legend(fontsize=8)
    _legend_of_rows(figure, found)
    return figure


def _points(panel: Any, found: list[Line], where: Any, colours: dict[str, Any]) -> None:
    for line in found:
        style = {"color": colours[line.system], "capsize": 3, **MARKERS[line.row]}
        panel.errorbar(where(line), line.loss.mean, yerr=line.loss.half, **style)
    panel.grid(alpha=0.3)


def _legend_of_rows(figure: Figure, found: list[Line]) -> None:
    """Below the panels, where it hides nothing."""
    rows = dict.fromkeys(line.row for line in found)
    marks = [Line2D([], [], color="grey", label=f"at {ROWS[row]}", **MARKERS[row]) for row in rows]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8)


def _bars(record: Record, words: str, value: Any) -> Figure:
    """A bar for each system in each row."""
    found, colours = lines(record), _colours(record)
    rows = list(dict.fromkeys(line.row for line in found))
    figure, panels = plt.subplots(
        1, len(rows), figsize=(4.5 * len(rows), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, row in zip(panels[0], rows, strict=True):
        own = [line for line in found if line.row == row]
        heights, errors = zip(*(value(line) for line in own), strict=True)
        panel.bar(
            range(len(own)),
            heights,
            yerr=errors if any(errors) else None,
            color=[colours[l.system] for l in own],
            capsize=3,
        )
        panel.set_xticks(range(len(own)), [line.system for line in own], rotation=30, ha="right", fontsize=8)
        panel.set_title(f"at {ROWS[row]}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel(words)
    return figure


def _colours(record: Record) -> dict[str, Any]:
    return {name: f"C{index}" for index, name in enumerate(record["protocol"]["systems"])}
