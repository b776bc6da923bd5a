"""Losses at equal wall-clock time, read from the curves of trainings with equal steps."""

from collections.abc import Mapping, Sequence
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
        seconds: of a step, the smallest of its medians. steps: done by then, at most all.
        loss: on the part `select`. difference: minus that of the reference, paired by seed; None for itself.
        rounds: the smallest and the largest mean of this difference, if the times of a single round of the clock are
            used; None without a clock.
    """

    seconds: float
    steps: float
    share: float
    loss: Interval
    difference: Interval | None
    rounds: tuple[float, float] | None = None


def at_time(record: Comparison) -> dict[str, AtTime]:
    """system -> what it has reached, without systems that have no times (see `record.seconds`), those whose depth grows
    (no step's time stands for all of theirs), and those whose first evaluation comes later."""
    row, name = record.row("iso_step"), record.protocol.reference
    steady = {system: own for system, own in row.items() if not record.cost(own[0]).grows}
    times = {system: own for system, trained in steady.items() if (own := record.seconds(trained))}
    if name not in times:
        return {}
    whole, last = steady[name][0].steps, {r.seed: r.select_loss for r in steady[name]}
    found = {}
    for system, seconds in times.items():
        own = steady[system]
        steps = min(float(own[0].steps), whole * (min(times[name]) / min(seconds)))
        if steps < max(r.curve[0][0] for r in own):  # it is not evaluated so early
            continue
        losses, against, rounds = _losses(own, steps), None, None
        if system != name and losses.keys() & last.keys():
            against = _difference(losses, last)
            if record.clock is not None:
                by_round = [whole * (a / b) for a, b in zip(times[name], seconds, strict=True)]
                means = [_difference(_losses(own, at), last).mean for at in by_round]
                rounds = (min(means), max(means))
        loss = interval(list(losses.values()))
        found[system] = AtTime(min(seconds), steps, steps / own[0].steps, loss, against, rounds)
    return found


def _losses(own: Sequence[Trained], steps: float) -> dict[int, float]:
    """seed -> loss after so many steps, on a line between two evaluations; the last one after the end."""
    return {r.seed: float(np.interp(steps, *zip(*r.curve, strict=True))) for r in own}


def _difference(losses: Mapping[int, float], last: Mapping[int, float]) -> Interval:
    """Paired by seed."""
    return interval([losses[seed] - last[seed] for seed in sorted(losses.keys() & last.keys())])


def table(record: Comparison) -> Table | None:
    """None if it is not asked for, or the reference is not there yet."""
    found = at_time(record) if TIME in record.protocol.rows else {}
    head = ["model", "n", "ms per step", "of its training", "loss on `select`", f"minus {record.protocol.reference}"]
    rows = [[name, t.loss.n, 1000 * t.seconds, t.share, t.loss, t.difference or ""] for name, t in found.items()]
    if record.clock is not None:
        head.append("by single rounds")
        for row, t in zip(rows, found.values(), strict=True):
            row.append("" if t.rounds is None else "{:.3f} to {:.3f}".format(*t.rounds))
    return Table(head, rows, formats={"ms per step": ".0f", "of its training": ".1%"}) if rows else None
