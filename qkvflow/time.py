"""Layer-time t in [0, 1] and its sinusoidal features, exact wherever the time is known at trace time.

    phi(t) = [t, sin(c t w), cos(c t w)],   w_k = 10000^(-k/S),  k = 0..S-1,  c = 1000        (2S+1 features)

Source: `SinusoidalPosEmb` of the official code (SDML-KU/qkvflow, nn/time_embed.py).

One ulp of a float32 t moves sin(1000 t) by 3e-5, and a bfloat16 t loses it altogether. So times of a grid are
Python floats (float64); their features are computed in float64 while tracing and stored as float32 constants.
Differs from the official code, which makes t in the compute dtype and disagrees with itself between jit and eager.
"""

from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array, Int

from qkvflow.axes import LAYERS, SINUSOID
from qkvflow.errors import UserError

TIME_SCALE = 1000.0
MAX_PERIOD = 10_000.0
_ROUNDING = 1e-9  # by which sums of steps may be outside [0, 1]


class Grid(eqx.Module):
    """Times known at trace time: all of them along `axis`, or a single one (`axis` None, one value)."""

    values: tuple[float, ...] = eqx.field(static=True)
    axis: Axis | None = eqx.field(static=True)


class GridPoint(eqx.Module):
    """One time of a grid, chosen by a traced index: exact although the index is only known at run time."""

    values: tuple[float, ...] = eqx.field(static=True)
    index: Int[Array, ""]


Time = Grid | GridPoint | NamedArray | Array | float


def grid(values, axis: str = LAYERS) -> Grid:
    """The times `values` (a sequence of float) along an axis called `axis`."""
    values = tuple(float(v) for v in values)
    return Grid(values, Axis(axis, len(values)))


def as_time(t) -> Time:
    """Python and NumPy numbers and sequences become exact grids; JAX arrays and NamedArrays stay traced times, a vector
    with the axis `layers`.

    Raises:
        UserError: for more than one axis, and for numbers outside [0, 1].
    """
    if isinstance(t, (Grid, GridPoint)):
        return t
    shape = np.shape(t.array if isinstance(t, NamedArray) else t)
    if len(shape) > 1:
        raise UserError(f"times must be one number or a vector, got the shape {shape}: flatten them.")
    if isinstance(t, NamedArray):
        return t
    if isinstance(t, jax.Array):
        return hax.named(t, LAYERS) if shape else t
    found = grid(t) if shape else Grid((float(t),), None)
    outside = [value for value in found.values if not -_ROUNDING <= value <= 1 + _ROUNDING]
    if outside:
        raise UserError(
            f"layer-time t is between 0 and 1, got {outside[0]:g}: the weights of layer k of L are those at t = k / L."
        )
    return found


def time_axis(t: Time) -> Axis | None:
    """The axis along which `t` varies, or None for a single time."""
    if isinstance(t, Grid):
        return t.axis
    if isinstance(t, NamedArray) and t.axes:
        return t.axes[0]
    return None


def frozen(t: Time, value: float) -> Time:
    """The time `value` in place of t; along its axis, if it has one."""
    axis = time_axis(t)
    return Grid((value,), None) if axis is None else Grid((value,) * axis.size, axis)


def on_time(functions, t, name: str) -> NamedArray:
    """The values of functions of time: NamedArray {[the axis of t,] name}, fp32 (fp64 under `jax_enable_x64`).

    Args:
        functions: (times [...], numpy or jax.numpy) -> [..., functions]. Times of a grid are evaluated in float64.
    """
    t = as_time(t)
    if isinstance(t, (Grid, GridPoint)):
        table = jnp.asarray(functions(np.asarray(t.values, np.float64), np))
        if isinstance(t, GridPoint):
            return hax.named(table[t.index], (name,))
        return hax.named(table, (t.axis.name, name)) if t.axis is not None else hax.named(table[0], (name,))
    array = t.array if isinstance(t, NamedArray) else jnp.asarray(t)
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    axes = [axis.name for axis in t.axes] if isinstance(t, NamedArray) else []
    at_one = partial(functions, xp=jnp)  # of one time: what functions hold has the rank of its features
    return hax.named(jax.vmap(at_one)(array) if axes else at_one(array), (*axes, name))


def sinusoidal_features(t, dim: int, scale: float = TIME_SCALE) -> NamedArray:
    """phi(t): NamedArray {[the axis of t,] sinusoid = 2 dim + 1}, float32 (float64 under `jax_enable_x64`).

    Args:
        scale: c, radians per unit of layer-time of the fastest feature.
    """

    def features(t, xp):
        angles = scale * t[..., None] * xp.asarray(_frequencies(dim), dtype=t.dtype)
        return xp.concatenate([t[..., None], xp.sin(angles), xp.cos(angles)], axis=-1)

    return on_time(features, t, SINUSOID)


def sinusoidal_rates(t, dim: int, scale: float = TIME_SCALE) -> NamedArray:
    """d phi / dt, with the axes and parameters of `sinusoidal_features`."""

    def rates(t, xp):
        speed = scale * xp.asarray(_frequencies(dim), dtype=t.dtype)
        angles = t[..., None] * speed
        return xp.concatenate([xp.ones_like(t)[..., None], speed * xp.cos(angles), -speed * xp.sin(angles)], axis=-1)

    return on_time(rates, t, SINUSOID)


def _frequencies(dim: int) -> np.ndarray:
    return np.exp(-np.log(MAX_PERIOD) * np.arange(dim) / dim)
