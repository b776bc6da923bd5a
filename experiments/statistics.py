"""Statistics over seeds, with scipy: Student's intervals, tests of difference and equivalence, Holm."""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

LEVEL = 0.95
ALPHA = 0.05  # the level of tests

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

    @property
    def numbers(self) -> dict[str, float]:
        """As columns of CSV, by what is added to the name of the column."""
        return dict(zip(("", " low", " high"), (self.mean, *self.bounds), strict=True))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}" if self.n > 1 else f"{self.mean:.3f}"


@dataclass(frozen=True)
class Difference(Interval):
    """The difference of two means, with Student's test (Welch's, of independent samples): t with df degrees of freedom,
    p two-sided, and the effect, Cohen's d_z = mean difference / its SD (d: see `unpaired`). These are nan if the
    differences are constant, or too few."""

    t: float = math.nan
    df: float = math.nan
    p: float = math.nan
    effect: float = math.nan

    @property
    def numbers(self) -> dict[str, float]:
        return super().numbers | {" t": self.t, " df": self.df, ": p": self.p}


@dataclass(frozen=True)
class Equivalence:
    """The tests of whether a difference is within a margin. p: the larger of the two one-sided ones. low, high: its
    interval of level 1 - 2 ALPHA. These are nan if the differences are constant, or too few."""

    p: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def numbers(self) -> dict[str, float]:
        """As columns of CSV, by what is added to the name of the column."""
        return {" low": self.low, " high": self.high, ": p": self.p}

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"

    def straddles(self, margin: float) -> bool:
        """Whether the interval contains an end of the margin: neither within it nor outside."""
        return any(self.low <= end <= self.high for end in (-margin, margin))


@dataclass(frozen=True)
class Contrast:
    """A mean and its difference to a reference; the latter and p_holm are None for the reference itself."""

    mean: Interval
    difference: Difference | None = None
    p_holm: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean, mean ± t_{n-1} SD / sqrt(n); half-width nan for a single value."""
    n = len(values)
    if n < 2:
        return Interval(values[0], math.nan, n)
    if not all(map(math.isfinite, values)):  # a loss of a diverged model
        return Interval(math.nan, math.nan, n)
    sd = statistics.stdev(values)
    # Not `stats.t.interval`: it rounds in a different order, and committed CSV files have all digits.
    t = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1))
    return Interval(statistics.fmean(values), t * sd / math.sqrt(n), n, sd)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """`first - second` over the seeds that both have; the right test if seeds share data or noise."""
    seeds = sorted(first.keys() & second.keys())
    own, other = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    found = vars(interval([a - b for a, b in zip(own, other, strict=True)]))
    if not found["sd"] > 0.0:
        return Difference(**found, df=len(seeds) - 1)
    test = stats.ttest_rel(own, other)
    effect = found["mean"] / found["sd"]
    return Difference(**found, t=float(test.statistic), df=float(test.df), p=float(test.pvalue), effect=effect)


def unpaired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """`first - second` of independent samples, by Welch's test; the right one if equal seeds have nothing in common.

    The effect is Cohen's d = difference / sqrt((SD_1^2 + SD_2^2) / 2); `sd` is the standard error times sqrt(n), with n
    of the smaller sample.
    """
    own, other = interval([*first.values()]), interval([*second.values()])
    difference, n = own.mean - other.mean, min(own.n, other.n)
    spread = math.hypot(own.sd, other.sd) / math.sqrt(2)
    if not spread > 0.0:
        return Difference(difference, math.nan, n)
    # Not `ttest_ind`, which warns of samples that are nearly constant.
    test = stats.ttest_ind_from_stats(own.mean, own.sd, own.n, other.mean, other.sd, other.n, equal_var=False)
    first_part, second_part = own.sd**2 / own.n, other.sd**2 / other.n
    error = math.sqrt(first_part + second_part)
    df = error**4 / (first_part**2 / (own.n - 1) + second_part**2 / (other.n - 1))
    half = float(stats.t.ppf(0.5 + LEVEL / 2, df)) * error
    t, p = float(test.statistic), float(test.pvalue)
    return Difference(difference, half, n, error * math.sqrt(n), t, df, p, difference / spread)


def equivalence(difference: Difference, margin: float) -> Equivalence:
    """Two one-sided tests (Schuirmann 1987) of -margin < mean difference < margin, with Student's t.

    They reject, at ALPHA, exactly if the interval of level 1 - 2 ALPHA lies within the margin.
    """
    if not difference.sd > 0.0:
        return Equivalence()
    error, df = difference.sd / math.sqrt(difference.n), difference.df
    p = max(stats.t.sf((difference.mean + margin) / error, df), stats.t.cdf((difference.mean - margin) / error, df))
    half = float(stats.t.ppf(1 - ALPHA, df)) * error
    return Equivalence(float(p), difference.mean - half, difference.mean + half)


def contrasts(
    values: Mapping[K, Mapping[int, float]],
    reference: Callable[[K], K],
    planned: int = 0,
    independent: Callable[[K], bool] = lambda key: False,
) -> dict[K, Contrast]:
    """Compares each of `values` (seed -> value) with another of them, `reference` of its key.

    The tests are paired by seed, but for keys that are `independent` of their reference.

    All tests together are the family for Holm's correction; with `planned`, so many, those that are missing included.
    Without common seeds there is no test.
    """
    against = {
        key: (unpaired if independent(key) else paired)(own, values[reference(key)])
        for key, own in values.items()
        if reference(key) != key and own.keys() & values.get(reference(key), {}).keys()
    }
    missing = [math.nan] * (planned - len(against))
    corrected = dict(zip(against, holm([*(difference.p for difference in against.values()), *missing]), strict=False))
    means = {key: interval(list(own.values())) for key, own in values.items()}
    return {key: Contrast(mean, against.get(key), corrected.get(key)) for key, mean in means.items()}


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for a family of m tests by Holm: p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)).

    nan values stay nan, and count as tests of the family. (scipy only has `false_discovery_control`.)
    """
    p, n = np.asarray(p_values, float), len(p_values)
    order, adjusted = np.argsort(p, kind="stable"), np.empty(n)  # nan is last
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, (n - np.arange(n)) * p[order]))
    return adjusted.tolist()
