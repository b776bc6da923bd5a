"""The numbers of the tables, from the JSON of the comparison alone: one line for each system in each row."""

import math
from dataclasses import dataclass
from typing import Any

from experiments.compare.config import ROWS
from experiments.statistics import Interval, Test, contrasts, interval

Record = dict[str, Any]


@dataclass(frozen=True)
class Reached:
    """A loss on the part `select`, where it is first read at or below `target`.

    n: trainings that reach it. steps, seconds, flops: means over those; nan if there are none.
    """

    target: float
    n: int
    steps: float
    seconds: float
    flops: float


@dataclass(frozen=True)
class Line:
    """
    loss: reported, nats per token. difference: to the reference, paired by seed; None for itself, as are
    test and p_holm (corrected over all systems of the row).
    cost: as in `cost.Cost`, with `memory`, `flops_in_all` and `tokens_in_all`. seconds: of a step, over seeds.
    """

    row: str
    system: str
    width: int
    steps: int
    learning_rate: float
    loss: Interval
    difference: Interval | None
    test: Test | None
    p_holm: float | None
    cost: dict[str, float]
    seconds: Interval
    reached: list[Reached]


def lines(record: Record) -> list[Line]:
    """All lines, by row, in the order of the systems."""
    return [line for row in ROWS if row in record["protocol"]["rows"] for line in _of_row(record, row)]


def select(record: Record, **keys: Any) -> list[Record]:
    """The trainings with these values; `row` is one of their rows."""
    row = keys.pop("row", None)
    return [
        r for r in record["results"] if (row is None or row in r["rows"]) and all(r[k] == v for k, v in keys.items())
    ]


def by_seed(results: list[Record], key: str) -> dict[int, float]:
    return {r["seed"]: r[key] for r in results}


def _of_row(record: Record, row: str) -> list[Line]:
    protocol = record["protocol"]
    systems, reference = list(protocol["systems"]), protocol["reference"]
    losses = {name: by_seed(select(record, row=row, system=name), "report_loss") for name in systems}
    against = contrasts(losses, lambda name: reference)
    found = []
    for name in systems:
        own = select(record, row=row, system=name)
        first = own[0]
        cost = record["costs"][f"{name}-d{first['width']}-s{first['steps']}"]
        cost = cost | {f"{k}_in_all": cost[k] * first["steps"] for k in ("flops", "tokens")}
        found.append(
            Line(
                row,
                name,
                first["width"],
                first["steps"],
                first["learning_rate"],
                against[name].mean,
                against[name].difference,
                against[name].test,
                against[name].p_holm,
                cost,
                interval([r["seconds_per_step"] for r in own]),
                [_reached(own, target, cost["flops"]) for target in protocol["targets"]],
            )
        )
    return found


def _reached(results: list[Record], target: float, flops: float) -> Reached:
    first = [(next((step for step, loss in r["curve"] if loss <= target), None), r) for r in results]
    there = [(step, r) for step, r in first if step is not None]
    if not there:
        return Reached(target, 0, math.nan, math.nan, math.nan)
    steps = sum(step for step, _ in there) / len(there)
    seconds = sum(step * r["seconds_per_step"] for step, r in there) / len(there)
    return Reached(target, len(there), steps, seconds, steps * flops)
