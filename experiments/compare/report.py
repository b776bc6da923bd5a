"""The results of the comparison: its record, and from that alone tables and figures."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments import style, tables
from experiments.compare.plan import ROWS, SAME_FLOPS, CompareConfig, Variant
from experiments.cost import Cost
from experiments.lines import Line, against, known, lines, table
from experiments.protocol import Protocol
from experiments.records import Record, Training
from experiments.statistics import interval
from experiments.tables import Cell, Table

# Marks of rows that share a training overlap: later ones are larger and hollow.
MARKERS = {
    row: {"marker": marker, "markersize": size, "fillstyle": fill, "linestyle": "none"}
    for row, marker, size, fill in zip(ROWS, "os^", (5, 8, 12), ("full", "none", "none"), strict=True)
}


@dataclass(kw_only=True)
class CompareProtocol(Protocol, CompareConfig):
    """steps: of the reference."""

    steps: int


@dataclass(frozen=True)
class Trained(Training, Variant):
    """A training of a variant."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """costs: label of a variant -> its costs, with memory. selection: trainings for the selection of learning rates."""

    protocol: CompareProtocol
    costs: dict[str, Cost]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)


Rows = Mapping[str, Mapping[str, Line]]  # row -> system -> its line


def by_row(record: Comparison) -> Rows:
    """The systems of a row are one family of tests."""
    found, p = {}, record.protocol
    for row in (row for row in ROWS if row in p.rows):
        own = {name: [r for r in record.of(system=name) if row in r.rows] for name in p.systems}
        costs = {name: record.costs[f"{name}-d{rs[0].width}-s{rs[0].steps}"] for name, rs in own.items()}
        found[row] = lines(own, p.reference, costs, {name: rs[0].steps for name, rs in own.items()})
    return found


def each(rows: Rows) -> list[tuple[str, Line]]:
    return [(row, line) for row, found in rows.items() for line in found.values()]


def reached(line: Line, target: float) -> dict[str, float]:
    """When the loss on the part `select` first reaches `target`: the number of trainings that reach it, and the mean
    steps, seconds and FLOPs of these; nan if there are none."""
    there = line.reaches(target)
    n, no = len(there), math.nan
    steps = sum(step for step, _ in there) / n if n else no
    seconds = sum(step * r.seconds_per_step for step, r in there) / n if n else no
    return {"n": n, "steps": steps, "seconds": seconds, "flops": steps * line.cost.flops}


def page(record: Comparison) -> Mapping[str, object]:
    p, rows = record.protocol, by_row(record)

    def way(line: Line, target: float) -> str:
        r = reached(line, target)
        few = "" if r["n"] == p.n else f" ({r['n']} of {p.n} seeds)"
        return "{steps:.0f}, {seconds:.0f}, {flops:.2g}".format(**r) + few if r["n"] else "not reached"

    ways = {f"to {t:g}: steps, s, FLOPs": lambda line, t=t: way(line, t) for t in p.targets}
    costs = {f"{line.what.system} ({row})": line for row, line in each(rows)}
    return {
        "tokens": p.steps * p.tokens_per_step,
        "rates": p.about_rates("each model in each size"),
        "same": SAME_FLOPS,
        "losses": "\n\n".join(f"## {title} (n = {p.n})\n\n{table}" for title, table in losses(record).items()),
        "distances": " or ".join(map(str, sorted({r.curve[0][0] for r in record.results}))),
        "costs": table("model", costs, known("width", "steps", "ms per step", "peak MiB"), ways),
    }


def losses(record: Comparison) -> dict[str, Table]:
    """Title -> table of losses of a row, which the same command reproduces to the last digit."""
    columns = known("width", "trained", "materialised", "steps", "FLOPs", "rate"), against(record.protocol.reference)
    return {f"At {ROWS[row]}": table("model", found, *columns) for row, found in by_row(record).items()}


def files(record: Comparison) -> dict[str, str | Table]:
    """The tables of losses in LaTeX; CSV with a line for each system in each row, and for each training."""
    p = record.protocol
    titled = {f"{tables.in_latex(title)} ($n = {p.n}$)": table for title, table in losses(record).items()}
    return {
        "table.tex": tables.latex(titled),
        "summary.csv": Table.of(_numbers(row, line, p.targets) for row, line in each(by_row(record))),
        "runs.csv": Table.of(vars(r) | {"rows": " ".join(r.rows)} for r in record.results),
    }


def _numbers(row: str, line: Line, targets: list[float]) -> dict[str, Cell]:
    what = {key: getattr(line.what, key) for key in ("system", "width", "steps", "learning_rate")}
    seconds = interval([r.seconds_per_step for r in line.trained]).mean
    cells = {"row": row, **what, **tables.contrast_numbers(line.loss), "seconds_per_step": seconds, **asdict(line.cost)}
    cells |= {"flops_in_all": line.flops, "tokens_in_all": line.cost.tokens * line.steps}
    for target in targets:
        cells |= {f"{key} to {target:g}": value for key, value in reached(line, target).items()}
    return cells


def draw(record: Comparison) -> Iterator[style.Named]:
    rows, looks = by_row(record), style.series_of(record.protocol.systems)
    yield "loss", _loss(record.protocol, rows, looks)
    yield "efficiency", _efficiency(record.protocol, rows, looks)
    yield "speed", _speed(rows, looks)


def _limits(p: CompareProtocol, rows: Rows) -> style.Span:
    """Common limits of all axes of losses."""
    first = [style.mean_curve([r.curve for r in line.trained])[1] for line in next(iter(rows.values())).values()]
    own = [line.loss.mean for _, line in each(rows)] + [at for curve in first for at in curve]
    return style.span(own, counts=p.counts.values())


def _loss(p: CompareProtocol, rows: Rows, looks: style.Looks) -> Figure:
    """Left: loss on the part `select` during training, in the first row. Right: reported losses in all rows."""
    figure, ((left, right),) = style.panels(1, 2, (12, 5.2), sharey=True)
    limits, (first, found) = _limits(p, rows), next(iter(rows.items()))
    left.set(xlabel=f"steps of {p.tokens_per_step:,} tokens", title=f"while training, at {ROWS[first]}")
    style.losses(left, p, "select", limits)
    style.curves(left, {name: style.mean_curve([r.curve for r in line.trained]) for name, line in found.items()}, looks)
    aside = {row: 0.2 * (k - 1) for k, row in enumerate(ROWS)}
    _points(right, rows, looks, lambda row, line: list(looks).index(line.what.system) + aside[row])
    style.arms(right, list(looks))
    right.set_title("reported, after training; 95 % intervals over seeds")
    style.losses(right, p, "report", limits)
    _legend_of_rows(figure, rows)
    return figure


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
        style.losses(panel, p, "report", _limits(p, rows))
    _legend_of_rows(figure, rows, looks)
    return figure


def _points(panel: Axes, rows: Rows, looks: style.Looks, where: Callable[[str, Line], float]) -> None:
    for row, line in each(rows):
        colour = looks[line.what.system]["color"]
        style.points(panel, [where(row, line)], [line.loss.mean], color=colour, **MARKERS[row])


def _legend_of_rows(figure: Figure, rows: Rows, looks: style.Looks | None = None) -> None:
    """A legend below the panels, where it covers nothing."""
    marks = [Line2D([], [], color=style.MUTED, label=f"at {ROWS[row]}", **MARKERS[row]) for row in rows]
    colours = {name: look["color"] for name, look in (looks or {}).items()}
    marks += [Line2D([], [], color=colour, marker="o", ls="none", label=name) for name, colour in colours.items()]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8)


def _speed(rows: Rows, looks: style.Looks) -> Figure:
    """Times of a step, one dot per seed: no intervals, since other work on the machine is not a random sample."""
    figure, (across,) = style.panels(1, len(rows), (4 * len(rows), 4), sharey=True)
    for panel, (row, found) in zip(across, rows.items(), strict=True):
        for k, (system, line) in enumerate(found.items()):
            times, colour = [1000 * r.seconds_per_step for r in line.trained], looks[system]["color"]
            panel.plot([k - 0.3, k + 0.3], [min(times)] * 2, color=colour, linewidth=2)
            style.seeds(panel, k, times, colour)
        style.arms(panel, list(found), rotation=30)
        panel.set_title(f"at {ROWS[row]}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    across[0].set(ylabel="ms per training step: each seed, and the minimum", ylim=(0, None))
    return figure
