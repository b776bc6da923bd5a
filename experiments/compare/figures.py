"""The figures of the comparison: losses while training and after it, against costs, in several widths; times."""

import statistics
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments import style
from experiments.compare import widths
from experiments.compare.plan import ROWS
from experiments.compare.record import CompareProtocol, Comparison, Rows, by_row, each, extent, seeds_of
from experiments.lines import Line
from experiments.statistics import interval

_CURVES = 6  # more of them hide each other
_PLACES = 8  # of the map that takes their place

# A system has a colour and a shape. Marks of rows that share a training overlap: later ones are larger and hollow.
MARKERS = {
    row: {"markersize": size, "fillstyle": fill, "linestyle": "none"}
    for row, size, fill in zip(ROWS, (5, 8, 12), ("full", "none", "none"), strict=True)
}


def draw(record: Comparison) -> Iterator[style.Named]:
    rows, looks = by_row(record), style.series_of(record.protocol.names)
    if rows:  # there may be searched rates alone
        yield "loss", _loss(record.protocol, rows, looks)
        yield "efficiency", _efficiency(record.protocol, rows, looks)
        yield "speed", _speed(record, rows, looks)
    yield from widths.draw(record, looks)


def _limits(p: CompareProtocol, rows: Rows) -> style.Span:
    """Common limits of all axes of losses."""
    first = [style.mean_curve([r.curve for r in line.trained])[1] for line in next(iter(rows.values())).values()]
    own = [line.loss.mean for _, line in each(rows)] + [at for curve in first for at in curve]
    return style.span(own, counts=p.counts.values())


def _loss(p: CompareProtocol, rows: Rows, looks: style.Looks) -> Figure:
    """Left: loss on the part `select` during training, in the first row; of many systems that minus the reference's.
    Right: reported losses in all rows."""
    limits, (first, found) = _limits(p, rows), next(iter(rows.items()))
    is_map = len(found) > _CURVES and p.reference in found
    figure, ((left, right),) = style.panels(1, 2, (12, 5.2), sharey=not is_map)
    left.set_title(f"while training, at {ROWS[first]}", fontsize=10)
    if is_map:
        _map(left, p, found, seeds_of({first: found}))
    else:
        style.losses(left, p, "select", limits, seeds_of({first: found}))
        curves = {name: style.mean_curve([r.curve for r in line.trained]) for name, line in found.items()}
        style.curves(left, curves, looks)
    left.set_xlabel(f"steps of {p.tokens_per_step:,} tokens" + (f", and the loss of {p.reference}" if is_map else ""))
    aside = {row: 0.2 * (k - 1) for k, row in enumerate(ROWS)}
    _points(right, rows, looks, lambda row, line: list(looks).index(line.what.system) + aside[row])
    style.arms(right, list(looks))
    right.set_title(f"reported, after training\n{style.about_bars(seeds_of(rows))}", fontsize=10)
    style.losses(right, p, "report", limits, seeds_of(rows))
    _legend_of_rows(figure, rows)
    return figure


def _map(panel: Axes, p: CompareProtocol, found: Mapping[str, Line], n: str) -> None:
    """Each system's loss on the part `select` minus that of the reference, paired by seed, after some steps; below the
    steps the loss of the reference."""
    curves = {name: {r.seed: dict(r.curve) for r in line.trained} for name, line in found.items()}
    reference = curves.pop(p.reference)
    pairs = {name: sorted(own.keys() & reference.keys()) for name, own in curves.items()}
    steps = sorted(set.intersection(*(set(curve) for own in (reference, *curves.values()) for curve in own.values())))
    steps = [steps[k - 1] for k in sorted({round(k) for k in np.geomspace(1, len(steps), min(_PLACES, len(steps)))})]
    cells = {
        name: [interval([curves[name][seed][step] - reference[seed][step] for seed in seeds]) for step in steps]
        for name, seeds in pairs.items()
        if seeds
    }
    columns = [f"{step:,}\n{statistics.fmean(own[step] for own in reference.values()):.2f}" for step in steps]
    style.heat(panel, list(cells), columns, list(cells.values()), sign="+")
    panel.tick_params(axis="x", rotation=0)
    for label in panel.get_xticklabels():
        label.set_horizontalalignment("center")
    panel.set_ylabel(
        f"loss on selection text minus {p.reference}\n(nats per {p.unit}), {style.about_bars(n)}", fontsize=9
    )


def _efficiency(p: CompareProtocol, rows: Rows, looks: style.Looks) -> Figure:
    """Reported loss against trained parameters and against training FLOPs, in all rows."""
    figure, (both,) = style.panels(1, 2, (12, 5.2), sharey=True)
    across = {"trained parameters": lambda row, line: line.cost.parameters}
    across |= {"FLOPs of the training": lambda row, line: line.flops}
    for panel, (words, where) in zip(both, across.items(), strict=True):
        _points(panel, rows, looks, where)
        panel.set(xscale="log", xlabel=words)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        style.losses(panel, p, "report", _limits(p, rows), seeds_of(rows))
        ends = {line.what.system: (where(row, line), line.loss.mean.mean) for row, line in each(rows)}
        style.direct(panel, ends, looks)
    _legend_of_rows(figure, rows)
    return figure


def _points(panel: Axes, rows: Rows, looks: style.Looks, where: Callable[[str, Line], float]) -> None:
    for row, line in each(rows):
        style.points(panel, [where(row, line)], [line.loss.mean], **{**looks[line.what.system], **MARKERS[row]})


def _legend_of_rows(figure: Figure, rows: Rows) -> None:
    """A legend below the panels, where it covers nothing."""
    marks = [Line2D([], [], color=style.MUTED, marker="o", label=f"at {ROWS[row]}", **MARKERS[row]) for row in rows]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8)


def _speed(record: Comparison, rows: Rows, looks: style.Looks) -> Figure:
    """Times of a step, one dot per seed, or round of the clock: no intervals, since other work on the machine is not a
    random sample."""
    figure, (across,) = style.panels(1, len(rows), (4 * len(rows), 4), sharey=True)
    without, counted = ("other machine", "n") if record.clock is None else ("not timed", "rounds")
    for panel, (row, found) in zip(across, rows.items(), strict=True):
        for k, (system, line) in enumerate(found.items()):
            times, colour = [1000 * own for own in record.seconds(line.trained)], looks[system]["color"]
            if times:
                panel.plot([k - 0.3, k + 0.3], [min(times)] * 2, color=colour, linewidth=2)
            else:
                look = {"rotation": 90, "fontsize": 7, "color": style.MUTED, "ha": "center"}
                panel.text(k, 0.02, without, transform=panel.get_xaxis_transform(), **look)
            style.seeds(panel, k, times, colour)
        style.arms(panel, list(found), rotation=30)
        there = extent(len(own) for line in found.values() if (own := record.seconds(line.trained)))
        panel.set_title(f"at {ROWS[row]}\n{counted} = {there or 0}", fontsize=10)
        panel.grid(False, axis="x")
        panel.grid(axis="y", alpha=0.3)
    across[0].set(ylabel="ms per training step (line: minimum)", ylim=(0, None))
    return figure
