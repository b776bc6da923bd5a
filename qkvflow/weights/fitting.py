"""From an ordinary stack of layers to basis weights: the least-squares fit of W(t) to the layers at their times.

    C = argmin sum_l || sum_k phi_k(t_l) C_k - W_l ||^2        for every array by itself; t_l: the times of the stack

With as many functions as layers, at times of equal distance, the sum is 0: exact by construction for pieces, up to
rounding for the others, which the condition of the matrix phi_k(t_l) amplifies: near 10 for `cosine`, exponential in L
for `chebyshev`, `linear` and `spline`, whose nodes are not the times of the layers (docs/hub.md has numbers).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from qkvflow.axes import BASIS, LAYERS
from qkvflow.errors import UserError
from qkvflow.named import map_named, named_leaves
from qkvflow.weights.base import at, replace_units
from qkvflow.weights.bases import FunctionBasis
from qkvflow.weights.galerkin import Galerkin
from qkvflow.weights.per_layer import PerLayer


@dataclass(frozen=True)
class Fit:
    """
    Attributes:
        weights: the block, each of its smallest modules a `Galerkin` one.
        error: ||W(t_l) - W_l|| / ||W_l||, the norms over all arrays and all layers, as fp32 reads W(t).
        errors: the same for each array, by its name, such as `attn.c_attn.weight`.
        condition: of the matrix phi_k(t_l).
    """

    weights: eqx.Module
    error: float
    errors: dict[str, float]
    condition: float


def fit(layers: PerLayer, basis: FunctionBasis) -> Fit:
    """Least squares in float64; the coefficients have the dtype of the layers.

    Raises:
        UserError: see `check_enough_layers`.
    """
    times = np.asarray(layers.times, np.float64)
    check_enough_layers(basis, times)
    phi = basis.values(times)
    coefficients = map_named(lambda w: _solved(phi, w), layers.blocks.stacked)
    as_read = [
        np.tensordot(phi.astype(np.float32), np.asarray(c.array, np.float32), 1) for _, c in named_leaves(coefficients)
    ]
    wrong, size = _squares(as_read, layers.blocks.stacked)

    def unit(module, key) -> Galerkin:
        del key
        return Galerkin(module, basis)

    return Fit(
        replace_units(coefficients, unit, key=jax.random.PRNGKey(0)),
        _relative(sum(wrong.values()), sum(size.values())),
        {name: _relative(wrong[name], size[name]) for name in wrong},
        float(np.linalg.cond(phi)),
    )


def read_error(weights: eqx.Module, layers: PerLayer) -> float:
    """||W(t_l) - W_l|| / ||W_l|| over all arrays and layers, as `weights` are read in their own precision."""
    as_read = [
        np.asarray(w.rearrange((LAYERS, ...)).array, np.float64) for _, w in named_leaves(at(weights, layers.times))
    ]
    wrong, size = _squares(as_read, layers.blocks.stacked)
    return _relative(sum(wrong.values()), sum(size.values()))


def check_enough_layers(basis: FunctionBasis, times: Sequence[float]) -> None:
    """Raises:
    UserError: the fit to layers at these times is not unique: there are more functions than layers, or the times leave
        some out (pieces, and times of unequal distance), or the condition exceeds fp64 (K = L = 48 of `chebyshev`
        and `spline`).
    """
    dim, layers = basis.dim, len(times)
    if dim > layers:
        raise UserError(
            f"{dim} functions of time cannot be determined from {layers} layers. Give at most {layers}; finetune_lm can"
            " refine the weights afterwards (mode: {type: flow, refine: K})."
        )
    if np.linalg.matrix_rank(basis.values(np.asarray(times, np.float64))) < dim:
        raise UserError(
            f"{dim} functions of time (basis: {basis.name}) cannot be determined from {layers} layers at their times:"
            f" the matrix phi_k(t_l) is singular in fp64. Give fewer than {dim}, or basis: cosine."
        )


def _solved(phi: np.ndarray, stacked: NamedArray) -> NamedArray:
    """{layers, axes of W} -> {basis, axes of W}."""
    stacked = stacked.rearrange((LAYERS, ...))
    rows = np.asarray(stacked.array, np.float64).reshape(len(phi), -1)
    found = np.linalg.solve(phi, rows) if phi.shape[0] == phi.shape[1] else np.linalg.lstsq(phi, rows, rcond=None)[0]
    array = jnp.asarray(found.reshape(phi.shape[1], *stacked.array.shape[1:]), stacked.dtype)
    return hax.named(array, (Axis(BASIS, phi.shape[1]), *stacked.axes[1:]))


def _squares(as_read: Sequence[np.ndarray], stacked) -> tuple[dict[str, float], dict[str, float]]:
    """By name of the array: ||W(t_l) - W_l||^2 and ||W_l||^2, summed over the layers.

    Args:
        as_read: W(t_l) of each array [layers, ...].
        stacked: the layers W_l.
    """
    wrong, size = {}, {}
    for read, (path, w) in zip(as_read, named_leaves(stacked), strict=True):
        name = ".".join(key.name for key in path)
        given = np.asarray(w.rearrange((LAYERS, ...)).array, np.float64)
        wrong[name] = float(np.sum((read - given) ** 2))
        size[name] = float(np.sum(given**2))
    return wrong, size


def _relative(wrong: float, size: float) -> float:
    return math.sqrt(wrong / size) if size else math.inf if wrong else 0.0
