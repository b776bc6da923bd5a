"""Measurements of a trained model: spectra of QK and OV over layer-time, and which tokens have large scores.

Spectra. Over all heads and eigenvalues lambda at a time: the mean of |lambda|, of |Re lambda|, and the share with
Re > 0. Their growth along t is log2 of the mean over the later half of the times divided by that over the earlier half.
The official analysis uses W(t) one time step too early (k/L instead of training's (k+1)/L), and real parts only.

Scores of tokens. `paper`: max_i sum_n log |R_n|_ii towards the last token; `official`: the same at the official code's
times and states; `coupled`: log of the largest growth of a perturbation of the token under the whole flow, all tokens
coupled (`lyapunov.token_map` at t = 1). What they mark: Spearman's correlation with three properties, in each text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel
from scipy import stats

from experiments.records import six_digits
from qkvflow.analysis import lyapunov, spectral
from qkvflow.analysis.reading import Reading, read
from qkvflow.axes import POSITION

FAMILIES = ("qk", "ov")
PROPERTIES = {
    "nearness": "position in the text: how close to its end",
    "rarity": "-log of its frequency in the training text",
    "surprise": "the model's own loss on it",
}
SCORES = ("paper", "coupled", "official")


@dataclass(frozen=True)
class Spectra:
    """
    Attributes:
        step: training steps done; 0 for an untrained model.
        reading: ours (training times), or official (one time step earlier).
        size, real: means of |lambda|, |Re lambda|; positive: share with Re lambda > 0; at each of `times`.
    """

    step: int
    family: str
    reading: str
    times: list[float]
    size: list[float]
    real: list[float]
    positive: list[float]

    @property
    def growth(self) -> float:
        """Growth of |lambda| along t, in octaves."""
        return _growth(self.size)

    @property
    def real_growth(self) -> float:
        """The same of |Re lambda|."""
        return _growth(self.real)

    @property
    def late_positive(self) -> float:
        """Share of eigenvalues with positive real part in the later half of the times."""
        return float(np.mean(self.positive[len(self.positive) // 2 :]))


@dataclass(frozen=True)
class Mark:
    """correlation: of a score with one of PROPERTIES, mean over the texts. sample: text, shuffled (the tokens of each
    text in random order), or untrained (the texts, with an untrained model)."""

    score: str
    sample: str
    property: str
    correlation: float


def spectra(values: np.ndarray, times: Sequence[float], step: int, family: str, reading: str) -> Spectra:
    """From eigenvalues [time, heads, head_size]."""
    flat = values.reshape(len(values), -1)
    size, real, positive = (np.abs(flat), np.abs(flat.real), flat.real > 0)
    means = ([six_digits(x) for x in part.mean(axis=1)] for part in (size, real, positive))
    return Spectra(step, family, reading, [six_digits(t) for t in times], *means)


def all_spectra(model: LmHeadModel, run: str, fresh: LmHeadModel, steps: Sequence[int], is_flow: bool) -> list[Spectra]:
    """At the given checkpoints of a run, of an untrained model, and with the official times at the end."""
    found, official = [], spectral.official_times(len(spectral.training_times(model)))
    for family in FAMILIES:
        times = spectral.training_times(model)
        found.append(spectra(spectral.eigenvalues(fresh, family), times, 0, family, "ours"))
        over = spectral.over_training(run, family, steps=steps)
        for step, values in zip(over.steps, over.eigenvalues.array, strict=True):
            found.append(spectra(values, over.times, step + 1, family, "ours"))
        if is_flow:
            for step, one in ((0, fresh), (steps[-1] + 1, model)):
                found.append(spectra(spectral.eigenvalues(one, family, official), official, step, family, "official"))
    return found


def marks(model: LmHeadModel, fresh: LmHeadModel, texts: np.ndarray, rarity: np.ndarray, is_flow: bool, seed: int):
    """Which tokens the scores mark, in texts [n, position] and in the null samples.

    rarity: of each token of the vocabulary.
    """
    rng = np.random.default_rng(seed)
    shuffled = np.stack([rng.permutation(text) for text in texts])
    found = []
    for sample, one, own in (("text", model, texts), ("shuffled", model, shuffled), ("untrained", fresh, texts)):
        by_score = scores(one, is_flow)
        each = [(properties(one, text, rarity), {n: f(text) for n, f in by_score.items()}) for text in own]
        for score in by_score:
            for name in PROPERTIES:
                values = [_correlation(scored[score], known[name]) for known, scored in each]
                found.append(Mark(score, sample, name, six_digits(float(np.mean(values)))))
    return found


def scores(model: LmHeadModel, is_flow: bool) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Name -> text -> a score for each of its tokens."""
    reading = read(model)

    def token(of: LmHeadModel | Reading, text: np.ndarray, **options) -> np.ndarray:
        return lyapunov.token_exponents(of, text, **options).sum(axis=0).max(axis=-1)

    found = {"paper": lambda text: token(reading, text), "coupled": lambda t: lyapunov.token_map(reading, t).array[-1]}
    return found | ({"official": lambda text: token(model, text, official_times=True)} if is_flow else {})


def properties(model: LmHeadModel, text: np.ndarray, rarity: np.ndarray) -> dict[str, np.ndarray]:
    """Properties of each token; the surprise of the first is unknown."""
    log_p = np.asarray(_log_p(model, NamedArray(jax.numpy.asarray(text), (POSITION,))))
    surprise = -log_p[np.arange(len(text) - 1), text[1:]]
    return {
        "nearness": np.arange(len(text), dtype=float),
        "rarity": rarity[text],
        "surprise": np.concatenate([[np.nan], surprise]),
    }


@eqx.filter_jit
def _log_p(model: LmHeadModel, tokens: NamedArray) -> jax.Array:
    return jax.nn.log_softmax(model(tokens).rearrange((POSITION, model.Vocab)).array)


def _correlation(score: np.ndarray, known: np.ndarray) -> float:
    """Spearman's correlation; without the first token, which has no surprise, and the last, towards which scores are
    computed. 0 if one of the two is constant."""
    score, known = score[1:-1], known[1:-1]
    varies = np.ptp(score) > 0 and np.ptp(known) > 0
    return float(stats.spearmanr(score, known).statistic) if varies else 0.0


def _growth(values: Sequence[float]) -> float:
    half = len(values) // 2
    return math.log2(np.mean(values[half:]) / np.mean(values[:half]))
