"""`weights: generated`: time networks generate every weight (Neural ODE Transformers).

For each smallest module m with parameters (a Linear, a norm, ...) with T = `time_embed_dim`:

    e(t)   = lin2(silu(lin1(phi(t))))              phi: {sinusoid} -> e: {time_embed = T}, fp32
    W(t)   = base + e(t).P                         P: {time_embed, axes of W}
    b(t)   = e(t).F                                no constant term
    gain(t) = 1 + e(t).G,   norm bias = e(t).F
    p(t)   = base + e(t).P                         parameters of other modules (a state-space model): base is the
                                                   ordinary initial value, and P starts at 0

Source: `TemporalLinear`, `TemporalLayerNorm` in the official nn/dynamic.py (Tong et al., ICLR 2025, eq. of section 3).
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from qkvflow.axes import SINUSOID, TIME_EMBED, TIME_HIDDEN
from qkvflow.time import TIME_SCALE, Time, frozen, grid, sinusoidal_features, sinusoidal_rates
from qkvflow.weights.base import TimeDependent, array_fields, replace_units
from qkvflow.weights.division import named_as, named_for_division
from qkvflow.weights.product import project
from qkvflow.weights.scales import TIME_SHARE, GeneratedScales, normal_linear


class TimeNetwork(eqx.Module):
    """e(t) = lin2(silu(lin1(phi(t)))), computed in fp32 whatever the compute dtype."""

    lin1: hnn.Linear  # sinusoid -> time_hidden
    lin2: hnn.Linear  # time_hidden -> time_embed
    sinusoidal_dim: int = eqx.field(static=True)
    time_scale: float = eqx.field(static=True)

    @staticmethod
    def init(
        time_embed_dim: int,
        sinusoidal_dim: int,
        scales: GeneratedScales,
        time_scale: float = TIME_SCALE,
        *,
        key,
        name: str = TIME_EMBED,
    ) -> "TimeNetwork":
        """`name`: what the output axis is called; `sinusoidal_dim` 0 leaves t as the only feature."""
        k_lin1, k_lin2 = jax.random.split(key)
        Sinusoid = Axis(SINUSOID, 2 * sinusoidal_dim + 1)
        Hidden, Out = Axis(TIME_HIDDEN, time_embed_dim), Axis(name, time_embed_dim)
        std1 = scales.lin1 if scales.lin1 is not None else (2 / Sinusoid.size) ** 0.5
        std2 = scales.lin2 if scales.lin2 is not None else (1 / Hidden.size) ** 0.5
        return TimeNetwork(
            normal_linear(Sinusoid, Hidden, std1, key=k_lin1),
            normal_linear(Hidden, Out, std2, key=k_lin2),
            sinusoidal_dim,
            time_scale,
        )

    @property
    def Out(self) -> Axis:
        return self.lin2.Out

    def __call__(self, t: Time) -> NamedArray:
        features = sinusoidal_features(t, self.sinusoidal_dim, self.time_scale)
        lin1, lin2 = self._in(features.dtype)
        return lin2(hnn.silu(lin1(features)))

    def rate(self, t: Time) -> NamedArray:
        """de/dt = lin2.weight (silu'(z) lin1.weight dphi/dt), z = lin1(phi(t))."""
        features, moving = (f(t, self.sinusoidal_dim, self.time_scale) for f in (sinusoidal_features, sinusoidal_rates))
        lin1, lin2 = self._in(features.dtype)
        moved = silu_rate(lin1(features)) * hax.dot(moving, lin1.weight, axis=SINUSOID)
        return hax.dot(moved, lin2.weight, axis=TIME_HIDDEN)

    def _in(self, dtype) -> tuple[hnn.Linear, hnn.Linear]:
        lin1, lin2 = (jax.tree.map(lambda p: p.astype(dtype), lin) for lin in (self.lin1, self.lin2))
        return lin1, lin2


def silu_rate(z: NamedArray) -> NamedArray:
    """d silu(z) / dz = s (1 + z (1 - s)), s = sigmoid(z)."""
    s = hnn.sigmoid(z)
    return s * (1 + z * (1 - s))


class Leaf(eqx.Module):
    """One generated array: w(t) = constant + base + e(t).projection, in the dtype of the parameters."""

    projection: NamedArray  # {time_embed, axes of w}, one of them called `features` if w has no `embed`
    base: NamedArray | None  # {axes of w}
    constant: float = eqx.field(static=True)
    ordinary: tuple[Axis, ...] = eqx.field(static=True)  # the axes of w

    def __call__(self, e: NamedArray) -> NamedArray:
        w = named_as(project(e, self.projection), self.ordinary)
        if self.base is not None:
            w = w + self.base
        return w + jnp.asarray(self.constant, w.dtype) if self.constant else w

    def rate(self, moved: NamedArray) -> NamedArray:
        """dw/dt from de/dt."""
        return named_as(project(moved, self.projection), self.ordinary)


class Generated(TimeDependent):
    """An ordinary module whose arrays are functions of time, produced from one time network."""

    net: TimeNetwork
    leaves: eqx.Module  # the ordinary module with a `Leaf` in place of each array
    frozen_time: float | None = eqx.field(static=True, default=None)

    def at(self, t: Time):
        e = self.net(t if self.frozen_time is None else frozen(t, self.frozen_time))
        return jax.tree.map(lambda leaf: leaf(e), self.leaves, is_leaf=_is_generated_leaf)

    def rate(self, t: Time):
        moved = self.net.rate(t if self.frozen_time is None else frozen(t, self.frozen_time))
        moved = moved if self.frozen_time is None else hax.zeros_like(moved)
        return jax.tree.map(lambda leaf: leaf.rate(moved), self.leaves, is_leaf=_is_generated_leaf)

    @property
    def flops(self) -> float:
        """2 (2S+1) T + 2 T^2 for e(t), and 2 T n for each array of n numbers, + n to add its base."""
        leaves = [x for x in jax.tree.leaves(self.leaves, is_leaf=_is_generated_leaf) if _is_generated_leaf(x)]
        net = 2.0 * (self.net.lin1.weight.size + self.net.lin2.weight.size)
        return net + sum(2.0 * x.projection.size + (x.base.size if x.base is not None else 0) for x in leaves)


def _is_generated_leaf(x) -> bool:
    return isinstance(x, Leaf)


def generate(
    module,
    time_embed_dim: int,
    sinusoidal_dim: int,
    scales: GeneratedScales,
    frozen_time: float | None = None,
    time_scale: float = TIME_SCALE,
    *,
    key,
):
    """Replace every smallest module with parameters inside `module` by a `Generated` one.

    `module` is an ordinary module; its arrays give the shapes and, for the preset `matched`, the initial values.

    Args:
        frozen_time: a fixed time in [0, 1] at which all weights are generated for every t: an ablation of time.
            Parameters and work are the same.
        time_scale: c of phi, radians per unit of time of its fastest feature.
    """

    def build(unit, key) -> Generated:
        made = _generate_unit(unit, time_embed_dim, sinusoidal_dim, scales, time_scale, key=key)
        return Generated(made.net, made.leaves, frozen_time)

    return replace_units(module, build, key=key)


def _generate_unit(
    unit, time_embed_dim: int, sinusoidal_dim: int, scales: GeneratedScales, time_scale: float, *, key
) -> Generated:
    k_net, *k_leaves = jax.random.split(key, 1 + len(array_fields(unit)))
    net = TimeNetwork.init(time_embed_dim, sinusoidal_dim, scales, time_scale, key=k_net)
    leaves = unit
    for name, k_leaf in zip(array_fields(unit), k_leaves, strict=True):
        leaf = _init_leaf(unit, name, net, scales, key=k_leaf)
        leaves = eqx.tree_at(lambda m, name=name: getattr(m, name), leaves, leaf)
    return Generated(net, leaves)


def _init_leaf(unit, name: str, net: TimeNetwork, scales: GeneratedScales, *, key) -> Leaf:
    ordinary: NamedArray = getattr(unit, name)
    w = ordinary.axes
    axes = (net.Out, *named_for_division(w))
    if isinstance(unit, hnn.normalization.LayerNormBase):
        return Leaf(hax.zeros(axes), None, 1.0 if name == "weight" else 0.0, w)
    if not isinstance(unit, hnn.Linear):
        return Leaf(hax.zeros(axes), ordinary, 0.0, w)
    if name == "bias":
        return Leaf(hax.random.normal(key, axes) * scales.bias, None, 0.0, w)
    if scales.projection is not None:
        return Leaf(hax.random.normal(key, axes) * scales.projection, hax.zeros(w), 0.0, w)
    e = net(grid(np.linspace(0.0, 1.0, 129)))
    std = jnp.sqrt(TIME_SHARE * hax.var(ordinary).array / (hax.sum(hax.square(e), TIME_EMBED).mean().array))
    return Leaf(hax.random.normal(key, axes) * std, ordinary * (1 - TIME_SHARE) ** 0.5, 0.0, w)
