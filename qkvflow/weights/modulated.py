"""`weights: modulated`: one block for all depths, multiplied by time-dependent gates (time-indexed sharing).

For each smallest module m with parameters (a Linear, a norm, ...), with H = `hidden_dim`:

    u(t)    = silu(lin1(phi(t)))                        phi: {sinusoid} -> u: {time_hidden = H}, fp32
    g_a(t)  = sigmoid(P_a u(t) + p_a)  or  1 + tanh(P_a u(t) + p_a)          for each group a of axes of m
    Linear:  W(t) = W * g_in(t) * g_out(t),   b(t) = b * g_out(t)            g_in: {In}, g_out: {Out}
    norm:    gain(t) = gain * g_out(t),       bias(t) = bias * g_out(t)      g_out: {embed}
    others:  p(t) = p * g_{p,a}(t) * ...                                     gates of its own for each array and axis

Scaling what goes into or comes out of a Linear is scaling the columns or rows of its weight and, for what comes out,
its bias. The gates M_1 .. M_4 that the source puts on activations are here: M_1 the `in` gate of attn.c_attn, M_2 the
`out` gate of attn.c_proj, M_3 the `in` gate of mlp.c_fc, M_4 the `in` gate of mlp.c_proj.

Source: scripts/test_time_indexed_weights.py of zaphrode/qkvflow; 1 + tanh (FiLM): its later THESIS.md.
Differs from it: gates act on weights, so that W(t) exists and can be discretised, adapted and analysed; they stand on
both sides of every Linear and on the norms (there the source has hypernetworks); they come from a hidden layer, as its
README says (its code has one linear map); and W(t) starts at the scale of the ordinary layer: since sigmoids start near
1/2, W is drawn twice as large for each of its gates.
"""

import functools
import operator
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray

from qkvflow.axes import SINUSOID, TIME_HIDDEN
from qkvflow.named import is_named, map_named
from qkvflow.time import TIME_SCALE, Time, frozen, sinusoidal_features, sinusoidal_rates
from qkvflow.weights.base import TimeDependent, array_fields, replace_units
from qkvflow.weights.division import named_as, named_for_division
from qkvflow.weights.generated import silu_rate
from qkvflow.weights.scales import GATE_LOGITS, normal_linear

GATES: dict[str, Callable[[NamedArray], NamedArray]] = {
    "sigmoid": hnn.sigmoid,
    "film": lambda s: 1 + hax.tanh(s),
}
_GATE_RATES: dict[str, Callable[[NamedArray], NamedArray]] = {
    "sigmoid": lambda s: hnn.sigmoid(s) * (1 - hnn.sigmoid(s)),
    "film": lambda s: 1 - hax.square(hax.tanh(s)),
}
_START = {"sigmoid": 0.5, "film": 1.0}  # the gate of a logit of 0


class GateNetwork(eqx.Module):
    """t -> the gates of one module by name, fp32 whatever the compute dtype."""

    lin1: hnn.Linear  # sinusoid -> time_hidden
    # For each gate: time_hidden -> the axes that it scales, one of them called `features` if none is `embed`.
    lin2: dict[str, hnn.Linear]
    sinusoidal_dim: int = eqx.field(static=True)
    gate: str = eqx.field(static=True)
    time_scale: float = eqx.field(static=True)

    @staticmethod
    def init(
        axes: dict[str, tuple[Axis, ...]], hidden_dim: int, sinusoidal_dim: int, gate: str, time_scale: float, *, key
    ) -> "GateNetwork":
        """`axes`: the name of each gate and what it scales."""
        k_lin1, *k_gates = jax.random.split(key, 1 + len(axes))
        Sinusoid, Hidden = Axis(SINUSOID, 2 * sinusoidal_dim + 1), Axis(TIME_HIDDEN, hidden_dim)
        std2 = GATE_LOGITS[gate] * (1 / Hidden.size) ** 0.5
        lin2 = {
            a: normal_linear(Hidden, named_for_division(axes[a]), std2, key=k)
            for a, k in zip(axes, k_gates, strict=True)
        }
        lin1 = normal_linear(Sinusoid, Hidden, (2 / Sinusoid.size) ** 0.5, key=k_lin1)
        return GateNetwork(lin1, lin2, sinusoidal_dim, gate, time_scale)

    def __call__(self, t: Time) -> dict[str, NamedArray]:
        features = sinusoidal_features(t, self.sinusoidal_dim, self.time_scale)
        lin1, lin2 = map_named(lambda p: p.astype(features.dtype), (self.lin1, self.lin2))
        hidden = hnn.silu(lin1(features))
        return {name: GATES[self.gate](linear(hidden)) for name, linear in lin2.items()}

    def rate(self, t: Time) -> dict[str, NamedArray]:
        """dg/dt of each gate: g'(s) lin2.weight (silu'(z) lin1.weight dphi/dt), z = lin1(phi), s = lin2(silu(z))."""
        features, moving = (f(t, self.sinusoidal_dim, self.time_scale) for f in (sinusoidal_features, sinusoidal_rates))
        lin1, lin2 = map_named(lambda p: p.astype(features.dtype), (self.lin1, self.lin2))
        before = lin1(features)
        hidden, moved = hnn.silu(before), silu_rate(before) * hax.dot(moving, lin1.weight, axis=SINUSOID)
        return {
            name: _GATE_RATES[self.gate](linear(hidden)) * hax.dot(moved, linear.weight, axis=TIME_HIDDEN)
            for name, linear in lin2.items()
        }


class Modulated(TimeDependent):
    """An ordinary module whose arrays are multiplied by gates of time."""

    net: GateNetwork
    base: eqx.Module  # the ordinary module
    frozen_time: float | None = eqx.field(static=True)

    def at(self, t: Time):
        axes, gates_of = gate_layout(self.base)
        gates = self.net(t if self.frozen_time is None else frozen(t, self.frozen_time))
        gates = {name: named_as(gate, axes[name]) for name, gate in gates.items()}
        return _replace_arrays(self.base, lambda name, array: _scale(array, [gates[g] for g in gates_of[name]]))

    def rate(self, t: Time):
        """The product rule: sum over the gates of each array, with one of them replaced by its rate."""
        axes, gates_of = gate_layout(self.base)
        t = t if self.frozen_time is None else frozen(t, self.frozen_time)
        still, moved = self.net(t), self.net.rate(t)
        if self.frozen_time is not None:
            moved = {name: hax.zeros_like(gate) for name, gate in moved.items()}
        still, moved = ({name: named_as(g, axes[name]) for name, g in gates.items()} for gates in (still, moved))

        def product_rule(name: str, array: NamedArray) -> NamedArray:
            own = gates_of[name]
            terms = [_scale(array, [moved[g] if g == one else still[g] for g in own]) for one in own]
            return functools.reduce(operator.add, terms)

        return _replace_arrays(self.base, product_rule)


def modulate(
    module,
    hidden_dim: int,
    sinusoidal_dim: int,
    gate: str = "sigmoid",
    frozen_time: float | None = None,
    time_scale: float = TIME_SCALE,
    *,
    key,
):
    """Replace every smallest module with parameters inside the ordinary `module` by a `Modulated` one.

    Args:
        frozen_time: a fixed time in [0, 1] at which all gates are evaluated for every t: modulation that does not
            depend on time, an ablation. Gates and parameters are otherwise the same.
        time_scale: c of phi, radians per unit of time of its fastest feature.
    """

    def build(unit, key) -> Modulated:
        axes, gates_of = gate_layout(unit)
        net = GateNetwork.init(axes, hidden_dim, sinusoidal_dim, gate, time_scale, key=key)
        base = _replace_arrays(unit, lambda name, array: array / _START[gate] ** len(gates_of[name]))
        return Modulated(net, base, frozen_time)

    return replace_units(module, build, key=key)


def gate_layout(unit) -> tuple[dict[str, tuple[Axis, ...]], dict[str, tuple[str, ...]]]:
    """The gates of a module: (name of the gate -> axes that it scales, name of the array -> its gates)."""
    fields = array_fields(unit)
    if isinstance(unit, hnn.Linear):
        of = {"weight": ("in", "out"), "bias": ("out",)}
        return {"in": _tuple(unit.In), "out": _tuple(unit.Out)}, {name: of[name] for name in fields}
    if isinstance(unit, hnn.normalization.LayerNormBase):
        return {"out": getattr(unit, fields[0]).axes}, {name: ("out",) for name in fields}
    axes = {f"{name}.{axis.name}": (axis,) for name in fields for axis in getattr(unit, name).axes}
    return axes, {name: tuple(f"{name}.{axis.name}" for axis in getattr(unit, name).axes) for name in fields}


def _scale(array: NamedArray, gates: list[NamedArray]) -> NamedArray:
    """The array times its gates, in its own dtype; with the axis of t, if the gates have one, in front."""
    time_axes = [a for a in gates[0].axes if a.name not in {b.name for b in array.axes}]
    scaled = array.broadcast_axis(time_axes)
    for gate in gates:
        scaled = scaled * gate.astype(array.dtype)
    return scaled.rearrange((*time_axes, *array.axes))


def _replace_arrays(unit, fn: Callable[[str, NamedArray], NamedArray]):
    names = array_fields(unit)
    new = [fn(name, getattr(unit, name)) for name in names]
    return eqx.tree_at(lambda m: [getattr(m, name) for name in names], unit, new, is_leaf=is_named)


def _tuple(axes) -> tuple[Axis, ...]:
    return (axes,) if isinstance(axes, Axis) else tuple(axes)
