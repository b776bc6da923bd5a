"""Losses at equal wall-clock time, read from the curves of trainings with equal steps on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.compare.plan import TIME
from experiments.compare.record import Comparison, Trained
from experiments.statistics import Interval, interval
from experiments.tables import Table


@dataclass(frozen=True)
class AtTime:
    """A system when the reference's time is over.

    Attributes:
        seconds: of a step, the smallest of the trainings' medians. steps: done by then, at most all.
        loss: on the part `select`. difference: minus that of the reference, paired by seed; None for itself.
    """

    seconds: float
    steps: float
    share: float
    loss: Interval
    difference: Interval | None


def at_time(record: Comparison) -> dict[str, AtTime]:
    """system -> what it has reached, without systems that have no trainings on the machine of the reference, those
    whose depth grows (no step's time stands for all of theirs), and those whose first evaluation comes later."""
    row, name = record.row("iso_step"), record.protocol.reference
    if not record.timed(row.get(name, ())):
        return {}
    here = {system: record.timed(own) for system, own in row.items() if not record.cost(own[0]).grows}
    if name not in here:
        return {}
    budget = here[name][0].steps * _seconds(here[name])
    last = {r.seed: r.select_loss for r in here[name]}
    found = {}
    for system, own in ((system, own) for system, own in here.items() if own):
        steps = min(float(own[0].steps), budget / _seconds(own))
        if steps < max(r.curve[0][0] for r in own):  # it is not evaluated so early
            continue
        losses = {r.seed: float(np.interp(steps, *zip(*r.curve, strict=True))) for r in own}
        pairs = [losses[seed] - last[seed] for seed in sorted(losses.keys() & last.keys())]
        against = interval(pairs) if pairs and system != name else None
        loss = interval(list(losses.values()))
        found[system] = AtTime(_seconds(own), steps, steps / own[0].steps, loss, against)
    return found


def _seconds(trained: Sequence[Trained]) -> float:
    return min(r.seconds_per_step for r in trained)


def table(record: Comparison) -> Table | None:
    """None if it is not asked for, or the reference is not there yet."""
    found = at_time(record) if TIME in record.protocol.rows else {}
    rows = [[name, t.loss.n, 1000 * t.seconds, t.share, t.loss, t.difference or ""] for name, t in found.items()]
    head = ["model", "n", "ms per step", "of its training", "loss on `select`", f"minus {record.protocol.reference}"]
    return Table(head, rows, formats={"ms per step": ".0f", "of its training": ".0%"}) if rows else None
