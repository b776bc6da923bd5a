"""`at(module, t)`, the central idea of qkvflow: a module whose leaves are functions of time becomes an ordinary module.

A time-dependent module is an ordinary Equinox/Haliax module in which some sub-modules are `TimeDependent`.
Evaluating it at t replaces each of them with an ordinary module with plain arrays: the result does not depend on time.
Training, discretisation, generation and analysis all use this function.
"""

import abc
import contextlib

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from qkvflow.named import map_named
from qkvflow.time import Grid, GridPoint, Time, as_time, time_axis
from qkvflow.weights.product import both_modes


class TimeDependent(eqx.Module):
    """Represents an ordinary module W(t)."""

    @abc.abstractmethod
    def at(self, t: Time):
        """The ordinary module at time t. If t has an axis, every array leaf has it as its first axis."""

    @abc.abstractmethod
    def rate(self, t: Time):
        """d/dt of every array of `at(t)`, in closed form."""

    @property
    def flops(self) -> float:
        """FLOPs of `at` for one time, by a formula on the shapes: by default, each parameter enters one multiplication
        and one addition."""
        return 2.0 * sum(x.size for x in jax.tree.leaves(self) if hasattr(x, "size"))


def evaluate(module, t: Time):
    """Like `at`, but leaves that do not depend on time stay unchanged, without the axis of t; differentiable in reverse
    mode, fast. For solvers."""
    t = as_time(t)
    return jax.tree.map(lambda m: m.at(t) if _is_time_dependent(m) else m, module, is_leaf=_is_time_dependent)


def at(module, t: Time):
    """The ordinary module at layer-time t.

    `t`: a number in [0, 1]; a sequence, a NumPy vector or a `Grid` (an axis `layers`); or a traced JAX array or
    NamedArray with at most one axis. With an axis in t the result is the stacked module, with exactly the leaf
    axes of `haliax.nn.Stacked`: leaves that do not depend on time are repeated along it.

    Differentiable in both modes with respect to a traced t, and to the parameters; for numbers t, in reverse mode.
    """
    t = as_time(t)
    with _modes(t):
        return _along(time_axis(t), evaluate(module, t))


def rate(module, t: Time):
    """dW/dt at layer-time t: the ordinary module of `at`, with the derivative in place of each floating point array.

    In closed form, in the precision of the parameters; zero for arrays that do not depend on time.

    Raises:
        UserError: for per-layer weights, which are not functions of time.
    """
    t = as_time(t)

    def derivative(m):
        if _is_time_dependent(m):
            return m.rate(t)
        return jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else x, m)

    with _modes(t):
        return _along(time_axis(t), jax.tree.map(derivative, module, is_leaf=_is_time_dependent))


def _modes(t: Time) -> contextlib.AbstractContextManager[None]:
    """Forward mode only where someone may differentiate by t: the backward pass of a grid stays the fast one."""
    return contextlib.nullcontext() if isinstance(t, (Grid, GridPoint)) else both_modes()


def _along(axis, module):
    """With `axis` on every array, repeated where it has none."""
    if axis is None:
        return module

    return map_named(lambda a: a if axis.name in {x.name for x in a.axes} else hax.broadcast_axis(a, axis), module)


def evaluation_flops(module) -> float:
    """FLOPs of `at(module, t)` for one time t. Needs shapes only, so `module` may come from `eqx.filter_eval_shape`."""
    parts = jax.tree.leaves(module, is_leaf=_is_time_dependent)
    return sum(m.flops for m in parts if _is_time_dependent(m))


def _is_time_dependent(x) -> bool:
    return isinstance(x, TimeDependent)


def replace_units(module, build, *, key):
    """Replace every smallest module with parameters (a Linear, a norm, ...) inside `module` by `build(unit, key)`."""
    units = [m for m in jax.tree.leaves(module, is_leaf=_is_unit) if _is_unit(m)]
    keys = iter(jax.random.split(key, len(units)))
    return jax.tree.map(lambda m: build(m, next(keys)) if _is_unit(m) else m, module, is_leaf=_is_unit)


def array_fields(module) -> list[str]:
    """The names of the parameters that belong to `module` itself, not to a module inside it."""
    return [name for name, value in vars(module).items() if isinstance(value, NamedArray)]


def _is_unit(x) -> bool:
    return isinstance(x, eqx.Module) and not isinstance(x, NamedArray) and bool(array_fields(x))
