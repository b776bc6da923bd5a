"""Eigenvalues for the page: at many layer-times, ordered to form trails, with those of untrained models."""

from collections.abc import Sequence

import equinox as eqx
import jax
import numpy as np
from levanter.models.lm_model import LmHeadModel
from scipy.optimize import linear_sum_assignment

from qkvflow.analysis import spectral
from qkvflow.analysis.many import for_each
from qkvflow.analysis.matrices import factors
from qkvflow.analysis.page.numbers import Data, Step, rounded
from qkvflow.errors import UserError
from qkvflow.runs.load import Run

SHOWN = ("radius", "positive", "symmetric")
_BETWEEN = 17  # additional times, for weights that are functions of time
_SAME = 1e-6


def has_weights_between(model: LmHeadModel) -> bool:
    """Whether W(t) is defined between the training times."""
    try:
        factors(model, "qk", (0.123456,))
    except UserError:
        return False
    return True


def layer_times(model: LmHeadModel, wanted: Sequence[float] | None) -> tuple[float, ...]:
    """The times of the page: `wanted`, or the training times and others between them. Ordinary layers always use the
    training times."""
    trained = spectral.training_times(model)
    if not has_weights_between(model):
        return trained
    if wanted is not None:
        return tuple(sorted(set(wanted)))
    between = [t for t in np.linspace(0.0, 1.0, _BETWEEN).tolist() if min(abs(t - s) for s in trained) > _SAME]
    return tuple(sorted({*trained, *between}))


def spectra(model: LmHeadModel, times: Sequence[float], points: int, step: Step) -> Data:
    """Eigenvalues and summaries of each family.

    Args:
        points: maximum number of eigenvalues per family; beyond it, only those that become largest are kept.
    """
    found: Data = {}
    for family in spectral.families(model):
        values = _followed(_by_head(spectral.eigenvalues(model, family, times), family))
        shown, left_out = _largest(values, points)
        own = spectral.summary(model, family, times)
        found[family] = {"re": rounded(shown.real), "im": rounded(shown.imag), "left_out": left_out}
        found[family] |= {name: rounded(getattr(own, name).reshape(len(times), -1)) for name in SHOWN}
        step()
    return found


def untrained(run: Run, times: Sequence[float], draws: int, points: int, step: Step) -> Data:
    """The same for untrained models: range of the summaries over heads and draws, eigenvalues of one model."""
    found: Data = {}
    for family in spectral.families(run.model):
        fresh = spectral.random_products(run.model, family, times, draws=draws)
        values, _ = _largest(_by_head(spectral.eigenvalues_of(fresh[0], family), family), points)
        cloud = values.reshape(len(times), -1)
        several = spectral.summaries_of(fresh, family)
        flat = {name: np.moveaxis(getattr(several, name), 0, -1).reshape(len(times), -1) for name in SHOWN}
        band = {name: [rounded(v.min(1)), rounded(v.max(1))] for name, v in flat.items()}
        found[family] = {"re": rounded(cloud.real), "im": rounded(cloud.imag), "band": band}
        step()
    return found


def fresh_model(run: Run, seed: int = 0) -> LmHeadModel:
    """An untrained model with the run's configuration."""
    return eqx.filter_jit(run.model.config.build)(run.model.Vocab, key=jax.random.PRNGKey(seed))


def _by_head(values: np.ndarray, family: str) -> np.ndarray:
    """[time, heads, count]; an MLP counts as one head."""
    return values[:, None] if family == "ff" else values


def _largest(values: np.ndarray, points: int) -> tuple[np.ndarray, int]:
    """The eigenvalues of [time, heads, count] with the largest maximum over time, at most `points` in total, and the
    number left out per head."""
    keep = max(1, min(values.shape[-1], points // (values.shape[0] * values.shape[1])))
    order = np.argsort(-np.abs(values).max(axis=0), axis=-1, kind="stable")[:, :keep]
    return np.take_along_axis(values, order[None], axis=-1), values.shape[-1] - keep


def _followed(values: np.ndarray) -> np.ndarray:
    """[time, heads, count], reordered so that each index follows one eigenvalue through time: adjacent times are
    matched with the smallest sum of squared distances."""
    times, heads, _ = values.shape
    values = values.copy()

    def follow(head: int) -> None:
        for n in range(1, times):
            now = values[n, head]
            cost = np.abs(values[n - 1, head][:, None] - now[None, :]) ** 2
            values[n, head] = now[linear_sum_assignment(cost)[1]]

    for_each(follow, heads)
    return values
