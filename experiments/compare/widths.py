"""Losses in several widths: a law in the logarithm of the width for each system, fitted for each seed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments import style
from experiments.compare.record import Comparison, extent
from experiments.statistics import Interval, interval
from experiments.tables import Cell, Table

ByWidth = Mapping[int, Mapping[int, float]]  # width -> seed -> loss


@dataclass(frozen=True)
class Law:
    """loss = a - b log2(width), by least squares for each seed.

    Attributes:
        losses: width -> loss, over the seeds that all widths have.
        slopes: seed -> b, the nats that a doubling of the width gains. bends: seed -> mean distance of the inner widths
            above the line through the outer ones; empty with two widths.
    """

    losses: dict[int, Interval]
    slopes: dict[int, float]
    bends: dict[int, float]

    @property
    def slope(self) -> Interval:
        return interval(list(self.slopes.values()))

    @property
    def bend(self) -> Interval | None:
        return interval(list(self.bends.values())) if self.bends else None


def law(found: ByWidth) -> Law | None:
    """None with a single width, or without a seed that all widths have."""
    widths = sorted(found)
    seeds = sorted(set.intersection(*(set(found[width]) for width in widths))) if widths else []
    if len(widths) < 2 or not seeds:
        return None
    losses = {width: interval([found[width][seed] for seed in seeds]) for width in widths}
    slopes, bends, (low, *inner, high) = {}, {}, widths
    for seed in seeds:
        own = {width: found[width][seed] for width in widths}
        slopes[seed] = -_slope([math.log2(width) for width in widths], list(own.values()))
        if inner:
            across = (own[low] - own[high]) / math.log2(high / low)
            bends[seed] = float(np.mean([own[w] - own[low] + across * math.log2(w / low) for w in inner]))
    return Law(losses, slopes, bends)


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """By least squares. Without BLAS: its last digits depend on the processor, and a page is the same on each."""
    center = math.fsum(x) / len(x)
    away = [value - center for value in x]
    return math.fsum(a * b for a, b in zip(away, y, strict=True)) / math.fsum(a * a for a in away)


def laws(record: Comparison) -> dict[str, Law]:
    """system -> its law, where all its widths are there."""
    whole = {name: own for name, own in record.by_width().items() if set(own) >= set(record.protocol.widths)}
    found = {name: law(own) for name, own in whole.items()}
    return {name: own for name, own in found.items() if own is not None}


def steeper(own: Law, reference: Law | None) -> Interval | None:
    """The difference of two slopes, paired by seed; None without common seeds."""
    seeds = own.slopes.keys() & reference.slopes.keys() if reference else set()
    return interval([own.slopes[s] - reference.slopes[s] for s in sorted(seeds)]) if reference and seeds else None


def table(record: Comparison) -> Table | None:
    """None if widths are not compared, or no law is there yet."""
    widths, reference = sorted(record.protocol.widths), record.protocol.reference
    found, rows = laws(record), []
    for name, own in found.items():
        cells: list[Cell] = [own.losses.get(width, "") for width in widths]
        against = None if name == reference else steeper(own, found.get(reference))
        rows.append([name, own.slope.n, *cells, own.slope, against or "", own.bend or ""])
    head = ["model", "n", *(f"width {width}" for width in widths), "b", f"b minus {reference}'s", "bend"]
    return Table(head, rows) if rows and widths else None


def draw(record: Comparison, looks: style.Looks) -> Iterator[style.Named]:
    """Reported losses against the width; nothing without laws."""
    p, widths, found = record.protocol, sorted(record.protocol.widths), laws(record)
    if not found:
        return
    figure, ((panel,),) = style.panels(1, 1, (7.5, 5.2))
    limits = style.span([loss for own in found.values() for loss in own.losses.values()], counts=[p.counts["report"]])
    panel.set_xscale("log", base=2)
    panel.set_xticks(widths, [str(width) for width in widths])
    panel.minorticks_off()
    n = extent(own.slope.n for own in found.values())
    panel.set_xlabel("width")
    panel.set_title(f"at {p.steps:,} steps; {style.about_bars(n)}", fontsize=10)
    style.losses(panel, p, "report", limits, n)
    style.curves(panel, {name: ([*own.losses], [*own.losses.values()]) for name, own in found.items()}, looks)
    yield "widths", figure
