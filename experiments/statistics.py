"""Statistics over seeds, by scipy: Student's intervals, paired and Welch tests, Holm's correction, effect sizes."""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats

LEVEL = 0.95

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """mean; sd: of the sample (n - 1); half: half the width of the mean's confidence interval (at LEVEL)."""

    mean: float
    half: float
    n: int
    sd: float = math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        return self.mean - self.half, self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}" if self.n > 1 else f"{self.mean:.3f}"


@dataclass(frozen=True)
class Test:
    """A test of whether two means differ.

    n: number of pairs, or of values in each group. t, df: Student's statistic and its degrees of freedom.
    p: two-sided. effect: of pairs Cohen's d_z = mean difference / its SD; of groups Hedges' g. All nan where values do
    not vary, or are too few.
    """

    difference: float
    n: tuple[int, ...]
    t: float
    df: float
    p: float
    effect: float


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean, mean ± t_{n-1} SD / sqrt(n); nan wide for a single value."""
    n = len(values)
    if n < 2:
        return Interval(values[0], math.nan, n)
    sd = statistics.stdev(values)
    t = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1))
    return Interval(statistics.fmean(values), t * sd / math.sqrt(n), n, sd)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Interval:
    """The interval of the mean difference `first - second` over the seeds that both have."""
    return interval(_differences(first, second))


def paired_test(first: Mapping[int, float], second: Mapping[int, float]) -> Test:
    """Student's paired test over the seeds that both have; the right one where seeds share data or noise."""
    differences = _differences(first, second)
    n, mean = len(differences), statistics.fmean(differences)
    sd = statistics.stdev(differences) if n > 1 else 0.0
    if sd == 0.0:
        return Test(mean, (n,), math.nan, n - 1, math.nan, math.nan)
    found = stats.ttest_1samp(differences, 0.0)
    return Test(mean, (n,), float(found.statistic), float(found.df), float(found.pvalue), mean / sd)


@dataclass(frozen=True)
class Contrast:
    """A mean, and its difference to a reference, paired by seed; the latter and its test are None for the reference."""

    mean: Interval
    difference: Interval | None = None
    test: Test | None = None
    p_holm: float | None = None


def contrasts(values: Mapping[K, Mapping[int, float]], reference: Callable[[K], K]) -> dict[K, Contrast]:
    """What each of `values` (seed -> value) is against another of them, `reference` of its key.

    All tests together are the family that Holm corrects for.
    """
    others = [key for key in values if reference(key) != key]
    tests = {key: paired_test(values[key], values[reference(key)]) for key in others}
    corrected = dict(zip(others, holm([tests[key].p for key in others]), strict=True))
    return {
        key: Contrast(
            interval(list(own.values())),
            paired(own, values[reference(key)]) if key in tests else None,
            tests.get(key),
            corrected.get(key),
        )
        for key, own in values.items()
    }


def welch_test(first: Sequence[float], second: Sequence[float]) -> Test:
    """Welch's test of two independent groups, which may vary differently."""
    found = stats.ttest_ind(first, second, equal_var=False)
    mean = statistics.fmean(first) - statistics.fmean(second)
    n = (len(first), len(second))
    return Test(mean, n, float(found.statistic), float(found.df), float(found.pvalue), hedges_g(first, second))


def hedges_g(first: Sequence[float], second: Sequence[float]) -> float:
    """Difference of means / pooled sample SD, times Hedges' correction J(df) = Γ(df/2) / (sqrt(df/2) Γ((df-1)/2))."""
    df = len(first) + len(second) - 2
    squares = sum((len(group) - 1) * statistics.variance(group) for group in (first, second))
    if squares == 0.0:
        return math.nan
    correction = math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)
    return correction * (statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(squares / df)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for a family of m tests by Holm: p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)).

    Those that are nan stay nan, and count as tests of the family.
    """
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    seeds = sorted(first.keys() & second.keys())
    return [first[seed] - second[seed] for seed in seeds]
