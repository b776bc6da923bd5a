"""Losses at equal wall-clock time, read from the curves of trainings with equal steps."""

from dataclasses import dataclass

import numpy as np

from experiments.compare.plan import TIME
from experiments.compare.record import Comparison
from experiments.statistics import Interval, interval
from experiments.tables import Table


@dataclass(frozen=True)
class AtTime:
    """A system when the reference's time is over.

    Attributes:
        seconds: of a step, the smallest of its medians. steps: done by then, at most all.
        loss: on the part `select`. difference: minus that of the reference, paired by seed; None for itself.
    """

    seconds: float
    steps: float
    share: float
    loss: Interval
    difference: Interval | None


def at_time(record: Comparison) -> dict[str, AtTime]:
    """system -> what it has reached, without systems that have no times (see `record.seconds`), those whose depth grows
    (no step's time stands for all of theirs), and those whose first evaluation comes later."""
    row, name = record.row("iso_step"), record.protocol.reference
    steady = {system: own for system, own in row.items() if not record.cost(own[0]).grows}
    times = {system: min(own) for system, trained in steady.items() if (own := record.seconds(trained))}
    if name not in times:
        return {}
    budget = steady[name][0].steps * times[name]
    last = {r.seed: r.select_loss for r in steady[name]}
    found = {}
    for system, seconds in times.items():
        own = steady[system]
        steps = min(float(own[0].steps), budget / seconds)
        if steps < max(r.curve[0][0] for r in own):  # it is not evaluated so early
            continue
        losses = {r.seed: float(np.interp(steps, *zip(*r.curve, strict=True))) for r in own}
        pairs = [losses[seed] - last[seed] for seed in sorted(losses.keys() & last.keys())]
        against = interval(pairs) if pairs and system != name else None
        loss = interval(list(losses.values()))
        found[system] = AtTime(seconds, steps, steps / own[0].steps, loss, against)
    return found


def table(record: Comparison) -> Table | None:
    """None if it is not asked for, or the reference is not there yet."""
    found = at_time(record) if TIME in record.protocol.rows else {}
    rows = [[name, t.loss.n, 1000 * t.seconds, t.share, t.loss, t.difference or ""] for name, t in found.items()]
    head = ["model", "n", "ms per step", "of its training", "loss on `select`", f"minus {record.protocol.reference}"]
    return Table(head, rows, formats={"ms per step": ".0f", "of its training": ".0%"}) if rows else None
