"""The matrices of a model over layer-time, as thin products: QK and OV of each head, FF of the MLP.

    QK_h = W_Q^h (W_K^h)^T,   OV_h = W_V^h W_O^h,   FF = W_1 W_2        all {embed, embed}, acting on rows: y = x M

Without norms, biases, activation, gate, rotary positions, 1/sqrt(head_size), a convolution before the attention, and
the alpha of a controlled block. Source: the official analysis/spectral.py, which omits the same where it has it.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.analysis import parts
from qkvflow.analysis.reading import check_finite
from qkvflow.axes import EMBED, HEADS, LAYERS
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.levanter_twin import enter
from qkvflow.time import grid
from qkvflow.weights import TimeDependent, at

FAMILIES = ("qk", "ov", "ff")


class ThinProduct(NamedTuple):
    """M = left @ right, for all times and heads.

    Attributes:
        left: [..., embed, inner].
        right: [..., inner, embed].
    """

    left: np.ndarray
    right: np.ndarray


def training_times(model: LmHeadModel) -> tuple[float, ...]:
    """The times in [0, 1] at which training evaluates W(t); layer k of an ordinary stack of L has time (k + 1)/L."""
    return enter(model).config.plan.times


def official_times(steps: int) -> tuple[float, ...]:
    """The times of the official analysis, k/steps for k = 0..steps-1: one step before the training times."""
    return tuple(k / steps for k in range(steps))


def products(model: LmHeadModel, family: str, times=None) -> ThinProduct:
    """The matrices of `family` (`qk`, `ov`, `ff`) at `times`.

    Args:
        times: numbers in [0, 1]; the training times by default. Only weights that are functions of time (generated,
            basis, modulated, constant) have values at other times.

    Returns:
        `ThinProduct` with leading axes [time, heads] for `qk` and `ov`, [time] for `ff`.

    Raises:
        UserError: a model without such matrices, times outside [0, 1], or times without weights.
    """
    return thin(*factors(model, family, times))


def thin(left: NamedArray, right: NamedArray) -> ThinProduct:
    """The two factors with their axes in order, as views: nothing is copied."""
    heads = (HEADS,) if HEADS in {a.name for a in left.axes} else ()
    (inner,) = {a.name for a in left.axes} - {LAYERS, HEADS, EMBED}
    return ThinProduct(_view(left, LAYERS, *heads, EMBED, inner), _view(right, LAYERS, *heads, inner, EMBED))


def check_family(family: str) -> None:
    """
    Raises:
        UserError: there is no such family.
    """
    if family not in FAMILIES:
        raise UserError(f"family: {family!r} is not known. Choices: {', '.join(FAMILIES)}.")


def factors(model: LmHeadModel, family: str, times=None) -> tuple[NamedArray, NamedArray]:
    """The factors of `products`, with axes in any order: both {layers, [heads,] embed, head_size or mlp}."""
    check_family(family)
    check_finite(model)
    model = enter(model)
    times = _checked(times, model.config.plan.times if times is None else times)
    select = parts.feed_forward_of if family == "ff" else parts.attention_of
    part, at_times = _part(model, select, times)
    return _factors(part, family, at_times)


def _part(model: NeuralOdeLMHeadModel, select: Callable, times: tuple[float, ...]):
    """The part of the blocks that `select` chooses, and the times at which it is still to be evaluated (None: already
    stacked along `layers`). Nothing else is computed."""
    weights = model.transformer.flow.weights
    if isinstance(weights, TimeDependent):  # a whole block at a time
        return select(weights.at(grid(times))), None
    return select(weights), times


@eqx.filter_jit
def _factors(part: eqx.Module, family: str, times: tuple[float, ...] | None) -> tuple[NamedArray, NamedArray]:
    # Compiled as a whole: what `family` does not need is not computed.
    module = part if times is None else at(part, grid(times))
    if family == "ff":
        maps = parts.feed_forward_maps(module)
        return maps.first, maps.last
    maps = parts.attention_maps(module)
    return (maps.q, maps.k) if family == "qk" else (maps.v, maps.o)


def _checked(given, times) -> tuple[float, ...]:
    try:
        times = tuple(float(t) for t in times)
    except (TypeError, ValueError):
        raise UserError(f"times must be numbers in [0, 1], got {given!r}.") from None
    outside = [t for t in times if not 0.0 <= t <= 1.0]
    if not times or outside:
        raise UserError(f"times must be at least one number in [0, 1], got {outside[0] if outside else 'none'}.")
    return times


def _view(array: NamedArray, *axes: str) -> np.ndarray:
    names = [a.name for a in array.axes]
    return np.asarray(array.array).transpose([names.index(axis) for axis in axes])
