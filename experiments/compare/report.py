"""What the comparison has found: its record, and from that alone tables and figures."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments import style, tables
from experiments.compare.plan import ROWS, SAME_FLOPS, CompareConfig, Variant
from experiments.cost import Cost
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, Interval, contrasts, interval
from experiments.tables import Cell, Table

# Rows that share a training lie upon each other: later ones are larger, and hollow.
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
    """costs: label of a variant -> its costs, with memory. selection: trainings that chose learning rates."""

    protocol: CompareProtocol
    costs: dict[str, Cost]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """A system in a row. trained: by seed. what: any of them, for what they share. flops: of the whole training.

    loss: reported, against the reference; p is corrected over all systems of the row. seconds: of a step, over seeds.
    """

    row: str
    trained: list[Trained]
    loss: Contrast
    cost: Cost

    @property
    def what(self) -> Trained:
        return self.trained[0]

    @property
    def flops(self) -> float:
        return self.cost.flops * self.what.steps

    @property
    def mebibytes(self) -> float:
        """Of memory, at the peak of a training step."""
        return (self.cost.memory or 0) / 2**20

    @property
    def seconds(self) -> Interval:
        return interval([r.seconds_per_step for r in self.trained])

    def reached(self, target: float) -> dict[str, float]:
        """Where the loss on the part `select` is first read at or below `target`: by how many trainings, and after how
        many steps, seconds and FLOPs, means over those; nan if there are none."""
        first = [(next((step for step, loss in r.curve if loss <= target), None), r) for r in self.trained]
        there = [(step, r) for step, r in first if step is not None]
        n, no = len(there), math.nan
        steps = sum(step for step, _ in there) / n if n else no
        seconds = sum(step * r.seconds_per_step for step, r in there) / n if n else no
        return {"n": n, "steps": steps, "seconds": seconds, "flops": steps * self.cost.flops}


Rows = Mapping[str, list[Line]]
Looks = Mapping[str, Mapping[str, Any]]  # system -> how it is drawn


def by_row(record: Comparison) -> Rows:
    """row -> its lines, in the order of the systems."""
    found, p = {}, record.protocol
    for row in (row for row in ROWS if row in p.rows):
        own = {name: [r for r in record.results if r.system == name and row in r.rows] for name in p.systems}
        against = contrasts({name: by_seed(trained) for name, trained in own.items()}, lambda name: p.reference)
        costs = {name: record.costs[f"{name}-d{rs[0].width}-s{rs[0].steps}"] for name, rs in own.items()}
        found[row] = [Line(row, own[name], against[name], costs[name]) for name in p.systems]
    return found


def lines(rows: Rows) -> list[Line]:
    return [line for found in rows.values() for line in found]


def page(record: Comparison) -> Mapping[str, Any]:
    p, n = record.protocol, len(record.protocol.seeds)
    targets = [f"to {t:g}: steps, s, FLOPs" for t in p.targets]
    costs = [_cost_cells(line, p.targets, n) for line in lines(by_row(record))]
    return {
        "p": p,
        "tokens": p.steps * p.tokens_per_step,
        "rates": p.about_rates("each model in each size"),
        "same": SAME_FLOPS,
        "losses": "\n\n".join(f"## {title} (n = {n})\n\n{table}" for title, table in losses(record).items()),
        "distances": " or ".join(map(str, sorted({r.curve[0][0] for r in record.results}))),
        "costs": Table(["model", "width", "steps", "ms per step", "peak MiB", *targets], costs),
    }


def losses(record: Comparison) -> dict[str, Table]:
    """Title -> the table of losses of a row, which the same command makes again to the last digit."""
    head = ["model", "width", "trained", "materialised", "steps", "FLOPs", "rate"]
    head += tables.contrast_head(record.protocol.reference)
    return {f"At {ROWS[row]}": Table(head, list(map(_loss_cells, found))) for row, found in by_row(record).items()}


def files(record: Comparison) -> dict[str, str | Table]:
    """The tables of losses in LaTeX; CSV of a line for each system in each row, and for each training."""
    n = len(record.protocol.seeds)
    titled = {f"{tables.in_latex(title)} ($n = {n}$)": table for title, table in losses(record).items()}
    return {
        "table.tex": tables.latex(titled),
        "summary.csv": Table.of(_numbers(line, record.protocol.targets) for line in lines(by_row(record))),
        "runs.csv": Table.of(vars(r) | {"rows": " ".join(r.rows)} for r in record.results),
    }


def _loss_cells(line: Line) -> list[Cell]:
    what, sizes = line.what, [tables.count(n) for n in (line.cost.parameters, line.cost.materialised)]
    training = [what.steps, f"{line.flops:.3g}", f"{what.learning_rate:g}"]
    return [what.system, what.width, *sizes, *training, *tables.contrast_cells(line.loss)]


def _cost_cells(line: Line, targets: list[float], n: int) -> list[Cell]:
    what, memory = line.what, f"{line.mebibytes:.0f}"
    cells = [
        f"{what.system} ({line.row})",
        what.width,
        what.steps,
        tables.milliseconds(r.seconds_per_step for r in line.trained),
        memory,
    ]
    for r in map(line.reached, targets):
        few = "" if r["n"] == n else f" ({r['n']} of {n} seeds)"
        cells.append("{steps:.0f}, {seconds:.0f}, {flops:.2g}".format(**r) + few if r["n"] else "not reached")
    return cells


def _numbers(line: Line, targets: list[float]) -> dict[str, Cell]:
    what = {key: getattr(line.what, key) for key in ("system", "width", "steps", "learning_rate")}
    cells = {"row": line.row, **what, **tables.contrast_numbers(line.loss)}
    cells |= {"seconds_per_step": line.seconds.mean, **asdict(line.cost)}
    cells |= {"flops_in_all": line.flops, "tokens_in_all": line.cost.tokens * line.what.steps}
    for target in targets:
        cells |= {f"{key} to {target:g}": value for key, value in line.reached(target).items()}
    return cells


def draw(record: Comparison) -> Iterator[style.Named]:
    rows = by_row(record)
    looks = {system: style.series(k) for k, system in enumerate(record.protocol.systems)}
    yield "loss", _loss(record.protocol, rows, looks)
    yield "efficiency", _efficiency(record.protocol, rows, looks)
    yield "speed", _speed(rows, looks)


def _limits(p: CompareProtocol, rows: Rows) -> style.Span:
    """Of all axes of losses."""
    first = [style.mean_curve([r.curve for r in line.trained])[1] for line in next(iter(rows.values()))]
    counts = [loss for own in p.counts.values() for n, loss in own.items() if n != "1"]
    return style.span([line.loss.mean for line in lines(rows)] + [at for own in first for at in own], counts)


def _loss(p: CompareProtocol, rows: Rows, looks: Looks) -> Figure:
    """Left: loss on the part `select` while training, in the first row. Right: reported losses in all rows."""
    figure, ((left, right),) = style.panels(1, 2, (12, 5.2), sharey=True)
    limits, (first, found) = _limits(p, rows), next(iter(rows.items()))
    ends = {}
    for line in found:
        name, (steps, own) = line.what.system, style.mean_curve([r.curve for r in line.trained])
        style.curve(left, steps, own, **looks[name])
        ends[name] = (steps[-1], own[-1].mean)
    left.set(xlabel=f"steps of {p.tokens_per_step:,} tokens", title=f"while training, at {ROWS[first]}")
    style.loss_axis(left, "the text to select by", p.unit, len(p.seeds), p.counts["select"], limits)
    style.direct(left, ends, {name: look["color"] for name, look in looks.items()})
    aside = {row: 0.2 * (k - 1) for k, row in enumerate(ROWS)}
    _points(right, rows, looks, lambda line: list(looks).index(line.what.system) + aside[line.row])
    style.arms(right, list(looks))
    right.set_title("reported, after training; 95 % intervals over seeds")
    style.loss_axis(right, "unseen text", p.unit, len(p.seeds), p.counts["report"], limits)
    _legend_of_rows(figure, rows)
    return figure


def _efficiency(p: CompareProtocol, rows: Rows, looks: Looks) -> Figure:
    """Reported loss against trained parameters and against FLOPs of the training, in all rows."""
    figure, (both,) = style.panels(1, 2, (12, 5.2), sharey=True)
    across = (("trained parameters", lambda line: line.cost.parameters), ("FLOPs of the training", lambda x: x.flops))
    for panel, (words, where) in zip(both, across, strict=True):
        _points(panel, rows, looks, where)
        panel.set(xscale="log", xlabel=words)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        style.loss_axis(panel, "unseen text", p.unit, len(p.seeds), p.counts["report"], _limits(p, rows))
    _legend_of_rows(figure, rows, looks)
    return figure


def _points(panel: Axes, rows: Rows, looks: Looks, where: Callable[[Line], float]) -> None:
    for line in lines(rows):
        style.points(
            panel, [where(line)], [line.loss.mean], color=looks[line.what.system]["color"], **MARKERS[line.row]
        )


def _legend_of_rows(figure: Figure, rows: Rows, looks: Looks | None = None) -> None:
    """Below the panels, where it hides nothing."""
    marks = [Line2D([], [], color=style.MUTED, label=f"at {ROWS[row]}", **MARKERS[row]) for row in rows]
    marks += [
        Line2D([], [], color=look["color"], marker="o", ls="none", label=name) for name, look in (looks or {}).items()
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8)


def _speed(rows: Rows, looks: Looks) -> Figure:
    """Times of a step, a dot for each seed: what other work on the machine adds is no interval of anything."""
    figure, (across,) = style.panels(1, len(rows), (4 * len(rows), 4), sharey=True)
    for panel, (row, found) in zip(across, rows.items(), strict=True):
        for k, line in enumerate(found):
            times = [1000 * r.seconds_per_step for r in line.trained]
            panel.plot([k - 0.3, k + 0.3], [min(times)] * 2, color=looks[line.what.system]["color"], linewidth=2)
            style.seeds(panel, k, times, looks[line.what.system]["color"])
        style.arms(panel, [line.what.system for line in found], rotation=30)
        panel.set_title(f"at {ROWS[row]}", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    across[0].set(ylabel="ms per training step: each seed, and the least", ylim=(0, None))
    return figure
