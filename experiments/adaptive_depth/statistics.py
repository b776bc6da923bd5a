"""Means and confidence intervals over seeds, by Student's t; differences are paired by seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """mean, and half the width of its confidence interval (at LEVEL, n - 1 degrees of freedom)."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}" if self.n > 1 else f"{self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean; not a number wide for a single value."""
    n = len(values)
    if n < 2:
        return Interval(values[0], math.nan, n)
    t = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1))
    return Interval(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n), n)


def paired(first: dict[int, float], second: dict[int, float]) -> Interval:
    """The interval of the mean difference `first - second` over the seeds that both have."""
    seeds = sorted(first.keys() & second.keys())
    return interval([first[seed] - second[seed] for seed in seeds])
