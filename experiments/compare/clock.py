"""Losses at equal wall-clock time, read from the curves of trainings with equal steps on one machine."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.compare.plan import TIME
from experiments.compare.record import Comparison, Trained
from experiments.statistics import Interval, interval
from experiments.tables import Cell, Table


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
    """system -> what it has reached; systems without trainings on the machine of the reference are left out."""
    row, name = record.row("iso_step"), record.protocol.reference
    if name not in row:
        return {}
    machine, _ = Counter(r.machine for r in row[name]).most_common(1)[0]
    here = {system: [r for r in own if r.machine == machine] for system, own in row.items()}
    budget = here[name][0].steps * _seconds(here[name])
    last = {r.seed: r.select_loss for r in here[name]}
    found = {}
    for system, own in ((system, own) for system, own in here.items() if own):
        steps = min(float(own[0].steps), budget / _seconds(own))
        losses = {r.seed: float(np.interp(steps, *zip(*r.curve, strict=True))) for r in own}
        pairs = [losses[seed] - last[seed] for seed in sorted(losses.keys() & last.keys())]
        against = interval(pairs) if pairs and system != name else None
        loss = interval(list(losses.values()))
        found[system] = AtTime(_seconds(own), steps, steps / own[0].steps, loss, against)
    return found


def _seconds(trained: Sequence[Trained]) -> float:
    return min(r.seconds_per_step for r in trained)


def numbers(record: Comparison) -> Iterator[Mapping[str, Cell]]:
    """CSV with a line for each system."""
    for name, own in at_time(record).items():
        cells = {"system": name, "seconds_per_step": own.seconds, "steps": own.steps, "n": own.loss.n}
        cells |= {"select_loss": own.loss.mean, "sd": own.loss.sd}
        yield cells if own.difference is None else cells | {"difference": own.difference.mean}


def section(record: Comparison) -> str:
    """The table with what it means; empty if it is not asked for, or the reference is not there yet."""
    p = record.protocol
    found = at_time(record) if TIME in p.rows else {}
    if not found:
        return ""
    words = (
        f"What each model has reached on `select` when {p.reference} has made its {p.steps:,} steps. Times are the"
        " smallest median time of a step among a model's trainings on the machine of the reference, which also did"
        " other work: they are what was measured, not a benchmark. A slower model is read from its curve before its"
        " learning rate has fallen; with a schedule that ends there its loss would probably be lower. A faster one has"
        " finished (100 %) and could have gone on."
    )
    rows = [
        [name, own.loss.n, f"{1000 * own.seconds:.0f}", f"{own.share:.0%}", own.loss, own.difference or ""]
        for name, own in found.items()
    ]
    head = ["model", "n", "ms per step", "of its training", "loss on `select`", f"minus {p.reference}"]
    return f"\n\n## At the same wall-clock time\n\n{words}\n\n{Table(head, rows)}"
