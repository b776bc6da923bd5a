"""The numbers of the tables, from the JSON of the experiment alone."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.gradient_flow.norms import Counts, clipped, counts
from experiments.gradient_flow.verdict import Verdict, final, verdict
from experiments.statistics import Interval, Test, holm, interval, paired, paired_test

Record = dict[str, Any]


@dataclass(frozen=True)
class Losses:
    """Losses of a system over seeds: of training (mean of the last steps), and reported; differences are to the
    baseline, paired by seed, None for itself; p is corrected by Holm over the systems."""

    system: str
    parameters: int
    training: Interval
    reported: Interval
    difference: Interval | None
    test: Test | None
    p_holm: float | None


@dataclass(frozen=True)
class Norms:
    """Norms of a component before clipping. median, largest, share (of the total norm, median): over the steps of each
    seed, then over seeds. counts: over all steps of all seeds, of which there are `steps`."""

    system: str
    component: str
    median: Interval
    largest: Interval
    share: Interval
    counts: Counts
    steps: int


def of_system(record: Record, system: str) -> list[Record]:
    """Its trainings, by seed."""
    return sorted((r for r in record["results"] if r["system"] == system), key=lambda r: r["seed"])


def by_seed(record: Record, system: str, value: Callable[[Record], float]) -> dict[int, float]:
    return {r["seed"]: value(r) for r in of_system(record, system)}


def losses(record: Record) -> list[Losses]:
    """A line for each system."""
    last, systems = record["protocol"]["final_steps"], record["protocol"]["systems"]
    reported = {name: by_seed(record, name, lambda r: r["report_loss"]) for name in systems}
    others = [name for name in systems if name != "baseline"]
    tests = {name: paired_test(reported[name], reported["baseline"]) for name in others}
    corrected = dict(zip(others, holm([tests[name].p for name in others]), strict=True))
    return [
        Losses(
            name,
            of_system(record, name)[0]["parameters"],
            interval([final(r["loss"], last) for r in of_system(record, name)]),
            interval(list(reported[name].values())),
            paired(reported[name], reported["baseline"]) if name in tests else None,
            tests.get(name),
            corrected.get(name),
        )
        for name in systems
    ]


def norms(record: Record) -> list[Norms]:
    """A line for each component of each system, the total last."""
    found = []
    for system in record["protocol"]["systems"]:
        own = of_system(record, system)
        for name in own[0]["norms"]:
            pairs = [(r["norms"][name], r["norms"]["total"]) for r in own]
            each = [counts(values, totals) for values, totals in pairs]
            found.append(
                Norms(
                    system,
                    name,
                    interval([statistics.median(values) for values, _ in pairs]),
                    interval([max(values) for values, _ in pairs]),
                    interval([statistics.median(map(_ratio, values, totals)) for values, totals in pairs]),
                    Counts(*(sum(getattr(c, field) for c in each) for field in Counts.__dataclass_fields__)),
                    sum(len(values) for values, _ in pairs),
                )
            )
    return found


def verdicts(record: Record, system: str) -> list[Verdict]:
    """The seed's rule for each seed."""
    last = record["protocol"]["final_steps"]
    found = []
    for own, baseline in zip(of_system(record, system), of_system(record, "baseline"), strict=True):
        after = None
        if system == "hybrid":
            after = clipped(own["norms"]["flow"], own["norms"]["total"], own["clip"])
        found.append(verdict(own["loss"], baseline["loss"], after, last))
    return found


def clipped_share(record: Record, system: str) -> Interval:
    """Share of the steps whose gradient was clipped."""
    own = of_system(record, system)
    return interval(
        [sum(t > r["clip"] for t in r["norms"]["total"]) / len(r["loss"]) if r["clip"] else 0.0 for r in own]
    )


def _ratio(value: float, total: float) -> float:
    return value / total if total else 0.0
