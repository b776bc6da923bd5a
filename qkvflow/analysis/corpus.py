"""Exponents over many texts, with confidence intervals and a baseline of shuffled tokens.

Single examples prove nothing: anything that is the same for shuffled tokens is not due to word order.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from qkvflow.errors import UserError


@dataclass(frozen=True)
class Interval:
    """A mean over `count` independent samples and its confidence interval (Student's t)."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: int


@dataclass(frozen=True)
class CorpusExponents:
    """Exponents of n texts of equal length, and of the same texts with shuffled tokens.

    Attributes:
        spectrum, shuffled_spectrum: the k largest exponents of each text, [n, k].
        scores, shuffled_scores: the paper's token score max_i sum_n log |R_n|_ii towards the last token, [n, position].
    """

    spectrum: np.ndarray
    shuffled_spectrum: np.ndarray
    scores: np.ndarray
    shuffled_scores: np.ndarray

    @property
    def spectrum_difference(self) -> Interval:
        """Text minus shuffled text, paired: [k]."""
        return mean_interval(self.spectrum - self.shuffled_spectrum)

    @property
    def score_difference(self) -> Interval:
        """The same for the token scores: [position]."""
        return mean_interval(self.scores - self.shuffled_scores)


def bootstrap_interval(samples, level: float = 0.95, resamples: int = 2000) -> Interval:
    """A bootstrap interval for samples far from normal, such as non-negative scores: percentiles of the means of
    samples redrawn with replacement (`scipy.stats.bootstrap`). It stays within the samples' range."""
    samples = np.asarray(samples, np.float64)
    _check_count(len(samples))
    found = stats.bootstrap(
        (samples,), np.mean, axis=0, confidence_level=level, n_resamples=resamples, method="percentile", rng=0
    ).confidence_interval
    return Interval(samples.mean(axis=0), found.low, found.high, len(samples))


def mean_interval(samples, level: float = 0.95) -> Interval:
    """The mean over the first axis and its confidence interval at `level`, for independent samples.

    Raises:
        UserError: fewer than two samples: they have no interval.
    """
    samples = np.asarray(samples, np.float64)
    count = len(samples)
    _check_count(count)
    mean = samples.mean(axis=0)
    half = stats.t.ppf(0.5 + level / 2, count - 1) * samples.std(axis=0, ddof=1) / np.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def _check_count(count: int) -> None:
    if count < 2:
        raise UserError(f"an interval needs at least two texts, got {count}.")
