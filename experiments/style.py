"""The style of figures: series distinct for colour-blind readers and in grey, axes of losses, heat maps, files."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import BboxBase

from experiments.counts import BEGINNING
from experiments.protocol import Protocol
from experiments.statistics import Interval, interval

Named = tuple[str, Figure]
Span = tuple[float, float]
Curves = Mapping[str, tuple[Sequence[float], Sequence[Interval]]]  # name -> x, y
Looks = Mapping[str, Mapping[str, Any]]  # name -> its style

# Okabe and Ito (2008): black last, no yellow, which is faint on white. Before black, two dark colours of Tol (2021).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "p", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)), (0, (3, 1, 1, 1)), (0, (12, 3)))
REFERENCE, MUTED = "black", "grey"
_LEVEL = "level"  # gid of the labels of `level`
_WORDS = {"select": "selection text", "report": "held-out text", BEGINNING: "the beginning of held-out text"}


def series(k: int) -> dict[str, Any]:
    """Colour, line and marker of the k-th series. Colours begin again after nine, with other lines and markers."""
    n = len(COLOURS)
    shifted = (k + k // n) % n
    return {"color": COLOURS[k % n], "linestyle": LINES[shifted], "marker": MARKS[shifted]}


def series_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A style for each name."""
    return {name: series(k) for k, name in enumerate(names)}


def empty(size: tuple[float, float]) -> Figure:
    """A figure without panels; not pyplot's, which keeps every figure until it is closed."""
    figure = Figure(size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels with grids, an array [rows, columns]."""
    figure = empty(size)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in axes.flat:
        panel.grid(alpha=0.25)
    return figure, axes


def tiles(n: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure with n panels of this size: up to three beside each other, four in two rows, more in rows of three."""
    columns = n if n <= 3 else 2 if n == 4 else 3
    rows = -(-n // columns)
    figure, axes = panels(rows, columns, (width * columns, height * rows), **options)
    filled, empty = axes.flat[:n], axes.flat[n:]
    for panel in filled:
        panel.tick_params(labelbottom=True)  # with a shared x axis, only the lowest row would have numbers
    for panel in empty:
        panel.remove()
    return figure, list(filled)


def half(own: Interval) -> float:
    """The half-width that is drawn: of two seeds, to both of them, since their interval is 12.7 times as wide."""
    return own.sd / math.sqrt(2) if own.n == 2 else own.half


def about_bars(n: int | str) -> str:
    """n, or `least to most`, and what bars and bands are, in words."""
    if str(n) == "1":
        return "n = 1 seed, without intervals"
    least = str(n).split(" to ")[0]
    two = "of two, both" if least == "2" else ""
    what = "bars and bands from one to the other" if str(n) == "2" else ", ".join(filter(None, ["95 % intervals", two]))
    return f"n = {n} seeds, {what}"


def curve(panel: Axes, x: Sequence[float], own: Sequence[Interval], **look: Any) -> None:
    """Means as a line, their intervals (or two seeds) as a band."""
    means, halves = np.array([i.mean for i in own]), np.array([half(i) for i in own])
    panel.plot(x, means, **{"markersize": 3.5, **look})
    low = means - halves
    if panel.get_yscale() == "log":  # it has no room below zero
        low = np.maximum(low, means / 10)
    panel.fill_between(x, low, means + halves, color=look["color"], alpha=0.13, linewidth=0)


def curves(panel: Axes, found: Curves, looks: Looks) -> None:
    """A curve for each name, labelled at its end. Call it last, when the axes are final."""
    for name, (x, own) in found.items():
        curve(panel, x, own, **looks[name])
    names(panel, found, looks)


def names(panel: Axes, found: Curves, looks: Looks) -> None:
    """The name of each curve at its end. Call it when the axes are final, also those that panels share."""
    direct(panel, {name: (x[-1], own[-1].mean) for name, (x, own) in found.items()}, looks)


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[Interval]]:
    """Steps, and at each the mean over the curves, one per seed: [step, value]."""
    own = [dict(one) for one in curves]
    steps = sorted(own[0])
    return steps, [interval([one[step] for one in own]) for step in steps]


def zero(panel: Axes) -> None:
    """A line at zero difference."""
    panel.axhline(0.0, color=REFERENCE, linewidth=0.8)


def points(panel: Axes, x: Sequence[float], own: Sequence[Interval], **look: Any) -> None:
    """Means with error bars for their intervals (or two seeds)."""
    panel.errorbar(x, [i.mean for i in own], yerr=[half(i) for i in own], capsize=3, zorder=4, **look)


def seeds(panel: Axes, x: float, values: Sequence[float], colour: Any) -> None:
    """A dot per seed."""
    panel.plot([x] * len(values), values, ".", color=colour, alpha=0.6, markersize=5)


def span(own: Iterable[Interval], more: Iterable[float] = (), counts: Iterable[Mapping[str, float]] = ()) -> Span:
    """Limits with room for all intervals, `more`, and losses of n-grams with n >= 2: the axis of all panels of a page
    that show the same quantity."""
    ends = [*(end for i in own for end in (i.mean, i.mean - half(i), i.mean + half(i))), *more]
    ends += [loss for each in counts for n, loss in each.items() if n != "1"]
    low, high = extent(ends) or (0.0, 1.0)
    room = 0.04 * (high - low)
    return low - room, high + room


def extent(values: Iterable[float]) -> Span | None:
    """The smallest and the largest of the finite values; None without any."""
    finite = [value for value in values if np.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def level(panel: Axes, y: float, words: str, colour: str = MUTED) -> None:
    """A horizontal line with a label above its left end, behind the data; `make_room` moves data away from it."""
    panel.axhline(y, color=colour, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.3}
    look = {"transform": panel.get_yaxis_transform(), "fontsize": 6.5, "color": colour, "bbox": box}
    panel.text(0.01, y, words, ha="left", va="bottom", zorder=1.5, gid=_LEVEL, **look)


def make_room(figure: Figure) -> None:
    """Moves the left ends of panels whose curves or points cross labels of `level`: their data then begins beside the
    widest of these that takes less than a third of the panel. Call it last."""
    if not any(text.get_gid() == _LEVEL for panel in figure.axes for text in panel.texts):
        return
    figure.draw_without_rendering()  # determines the sizes of panels and labels
    shares: dict[Axes, float] = {}
    for panel in figure.axes:
        labels = [text.get_window_extent() for text in panel.texts if text.get_gid() == _LEVEL]
        width = panel.get_window_extent().width
        widths = [label.width for label in labels if label.width < width / 3 and _is_crossed(label, panel)]
        first = min(panel.get_shared_x_axes().get_siblings(panel), key=figure.axes.index)
        share = 0.03 + max(widths, default=0.0) / width
        shares[first] = max(share if widths else 0.0, shares.get(first, 0.0))
    for panel, share in shares.items():
        if not share:
            continue
        scale, is_log = panel.xaxis.get_transform(), panel.get_xscale() == "log"
        siblings = panel.get_shared_x_axes().get_siblings(panel)
        begins = min(own.dataLim.minposx if is_log else own.dataLim.x0 for own in siblings)
        (low, high), begin = scale.transform(np.array(panel.get_xlim())), scale.transform(np.array([begins]))[0]
        wanted = (begin - share * high) / (1 - share)
        if np.isfinite(wanted) and wanted < low:
            ticks = [tick for tick in panel.get_xticks() if panel.get_xlim()[0] <= tick <= panel.get_xlim()[1]]
            if panel.get_xscale() == "linear" and not isinstance(panel.xaxis.get_major_locator(), FixedLocator):
                panel.set_xticks(ticks)  # none where no data is
            panel.set_xlim(left=float(scale.inverted().transform(np.array([wanted]))[0]))


def _is_crossed(label: BboxBase, panel: Axes) -> bool:
    """Whether a line or an error bar of the data comes as near to a label as half a marker."""
    own = [(line.get_path(), line.get_transform()) for line in panel.lines]
    own += [
        (path, c.get_transform()) for c in panel.collections if isinstance(c, LineCollection) for path in c.get_paths()
    ]
    paths = [path.transformed(to) for path, to in own if to.contains_branch(panel.transData)]
    return any(path.intersects_bbox(label.padded(4), filled=False) for path in paths)


def loss_axis(panel: Axes, what: str, unit: str, n: int | str, counts: Mapping[str, float], limits: Span) -> None:
    """An axis of losses: of `what` text, per `unit`, over n seeds, with those of n-grams, n >= 2, for comparison.

    counts: n -> their loss, counted in as much text as the models train on.
    """
    # Constrained layout reserves space for every label, even for one of a line outside the axis.
    inside = sorted((loss, size) for size, loss in counts.items() if size != "1" and limits[0] <= loss <= limits[1])
    words = ""
    for (loss, size), (above, _) in itertools.pairwise([*inside, (np.inf, "")]):
        words = ", ".join(filter(None, (f"{size}-grams {loss:.2f}", words)))
        is_near = above - loss < 0.025 * (limits[1] - limits[0])  # labels would overlap
        level(panel, loss, "" if is_near else words)
        words = words if is_near else ""
    both = " (both shown)" if str(n) == "2" else ""
    panel.set_ylabel(f"loss on {what}\n(nats per {unit}), n = {n}{both}", fontsize=9)
    panel.set_ylim(limits)


def losses(panel: Axes, p: Protocol, part: str, limits: Span, n: int | str | None = None) -> None:
    """An axis of losses on a part of the text of a study. n: of seeds, if not as planned.

    Records older than the counts of a part have no lines.
    """
    loss_axis(panel, _WORDS[part], p.unit, p.n if n is None else n, p.counts.get(part, {}), limits)


def direct(panel: Axes, ends: Mapping[str, tuple[float, float]], looks: Looks) -> None:
    """The name of each series to the right of the panel, at the height of its end (x, y) or as near as possible.

    Series whose end is not finite have no name there.
    """
    panel.figure.draw_without_rendering()  # determines the position of the panel
    ends = {name: end for name, end in ends.items() if np.isfinite(end).all()}
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = [panel.transData.transform(ends[name])[1] for name in names]
    beside, to_data = panel.get_yaxis_transform(), panel.transData.inverted()  # x in widths of the panel, y in data
    for name, height in zip(names, apart(heights, 0.12 * panel.figure.dpi), strict=True):
        color = looks[name]["color"]
        # relpos: the line ends at the left edge of the name
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        panel.annotate(
            name,
            xy=ends[name],
            xytext=(1.02, to_data.transform((0, height))[1]),
            textcoords=beside,
            annotation_clip=False,
            fontsize=7.5,
            color=color,
            va="center",
            arrowprops=line,
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending `heights`, moved as little as possible (least squares) so that neighbours are at least `gap` apart."""
    groups: list[list[float]] = []  # heights less their place times gap; the members of a group take its mean
    for place, height in enumerate(heights):
        groups.append([height - place * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [float(np.mean(group)) for group in groups for _ in group]
    return [mean + place * gap for place, mean in enumerate(means)]


def heat(
    panel: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[Interval]],
    limits: Span | None = None,
    sign: str = "",
) -> None:
    """A map of means, darker for larger ones, with the mean and the interval's half-width in each cell.

    Cells whose mean is not finite have no colour.

    Args:
        limits: of the colours, for all maps of a page that show the same quantity.
        sign: `+` shows the sign of positive means, too.
    """
    means = np.array([[cell.mean for cell in row] for row in cells])
    low, high = limits or extent(means.flat) or (0.0, 1.0)
    panel.grid(False)
    shown = np.where(np.isfinite(means), means, np.nan)
    panel.imshow(shown, cmap="cividis_r", aspect="auto", vmin=low, vmax=high)
    dark = (low + high) / 2
    for (i, j), mean in np.ndenumerate(means):
        half = f"\n±{_shown(cells[i][j].half)}" if cells[i][j].n > 1 else ""
        words = f"{round(mean, 2) + 0.0:{sign}.2f}{half}" if np.isfinite(mean) else "not finite"
        colour = "white" if np.isfinite(mean) and mean > dark else "black"
        panel.text(j, i, words, ha="center", va="center", fontsize=7, color=colour)
    panel.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)
    panel.set_yticks(range(len(rows)), rows, fontsize=8)


def _shown(half: float) -> str:
    """With two decimals, or up to the first that is not 0: `0.00` would look like an interval without width."""
    return f"{half:.1g}" if 0.0 < half < 0.005 else f"{half:.2f}"


def arms(panel: Axes, names: Sequence[str], rotation: float = 20) -> None:
    """Names of arms below a panel, at 0, 1, ..."""
    panel.set_xticks(range(len(names)), names, rotation=rotation, ha="right", fontsize=8)
    panel.set_xlim(-0.5, len(names) - 0.5)


def save(figures: Iterable[Named], folder: Path) -> None:
    """PNG for pages, PDF for papers; equal figures give equal files."""
    for name, figure in figures:
        make_room(figure)
        figure.savefig(folder / f"{name}.png")
        figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
