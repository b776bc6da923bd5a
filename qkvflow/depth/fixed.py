"""Fixed-step integration in depth: one scan over the steps, each an explicit Runge-Kutta step.

The weights W(t) come in one of two ways, with the same numbers:
- `batched`: at all distinct stage times in one product before the scan; stores what an ordinary transformer stores;
- `in_scan`: inside each step; stores the weights of one step and computes them again in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS, STEPS
from qkvflow.depth import reversible
from qkvflow.depth.jitter import jittered
from qkvflow.depth.plan import Plan
from qkvflow.depth.steps import advance, increment, read, start
from qkvflow.time import GridPoint, grid

At = Callable[[Any, Any], Any]
Field = Callable[[Any, NamedArray, Any, Any], NamedArray]


def integrate(
    field: Field, at: At, params, x: NamedArray, plan: Plan, *, args=None, key=None, trajectory: bool = False
):
    """x(1) from x(0) = `x` under dx/dt = field(W(t), x, args, key), W(t) = at(params, t).

    Args:
        field: the vector field. Neither it nor `at` may close over anything that has a gradient.
        at: takes `params` and a `Grid` (an axis `layers`), a `GridPoint`, or a traced time.
        params: what the weights are made of; any pytree.
        x: the state, NamedArray; its dtype is kept.
        args: what else the field reads (a mask, a control); any pytree.
        key: for dropout and jitter. One mask per step, shared by the stages of the step: the field is a function
            within a step.
        trajectory: also return the states after each step, with the axis `layers` in front.
    Returns:
        x(1), or (x(1), states).
    """
    Steps = Axis(STEPS, plan.steps)
    times, lengths = None, None
    if plan.jitter:
        key_grid, key = jax.random.split(key)
        times, lengths = jittered(plan, key_grid)
    rows = _Rows(
        weights=None,
        indices=jnp.asarray(plan.time_rows),
        key=jax.random.split(key, plan.steps) if key is not None else None,
        length=lengths,
    )
    shared = _Shared(params, args, times, None)
    if plan.evaluate == "batched":
        stacked = at(params, grid(plan.times) if times is None else times)
        slots = _slots(stacked, plan, Steps)
        per_step, unstacked = eqx.partition(slots, _has_steps, is_leaf=_is_named)
        rows = eqx.tree_at(lambda r: r.weights, rows, per_step, is_leaf=_is_none)
        # Everything that the steps need is there: without `params` no gradient of them is carried along.
        shared = _Shared(None, args, None, unstacked)

    def psi(x: NamedArray, shared: _Shared, row: _Rows, backward: bool) -> NamedArray:
        def evaluate(slot: int, state: NamedArray) -> NamedArray:
            dx = field(_weights(slot, shared, row, plan, at), state.astype(dtype), shared.args, row.key)
            return dx.astype(state.dtype)

        return increment(evaluate, x, plan, plan.step if row.length is None else row.length, backward=backward)

    dtype = x.dtype
    if plan.adjoint == "reversible" and not trajectory:
        return reversible.integrate(psi, x, shared, rows, Steps, plan.coupling)

    def step(state, row: _Rows):
        state = advance(lambda x, backward: psi(x, shared, row, backward), state, plan.coupling)
        return state, (read(state, dtype) if trajectory else None)

    # In a trajectory of the reversible scheme gradients are those of `checkpoint`: equal, and with its memory.
    end, states = hax.scan(step, Steps, remat=plan.adjoint != "direct")(start(x, plan.coupling), rows)
    return (read(end, dtype), states.rename({STEPS: LAYERS})) if trajectory else read(end, dtype)


class _Shared(eqx.Module):
    """What all steps read."""

    params: Any
    args: Any
    times: NamedArray | None  # of a jittered grid
    unstacked: Any  # weights that do not depend on time, for each slot


class _Rows(eqx.Module):
    """What one step reads; outside the scan with the axis `steps`."""

    weights: Any  # for each slot
    indices: jax.Array  # of the slots' times in `plan.times`
    key: Any
    length: jax.Array | None


def _weights(slot: int, shared: _Shared, row: _Rows, plan: Plan, at: At):
    if plan.evaluate == "batched":
        return eqx.combine(row.weights[slot], shared.unstacked[slot], is_leaf=_is_named)
    index = row.indices[slot]
    return at(shared.params, GridPoint(plan.times, index) if shared.times is None else shared.times.array[index])


def _slots(stacked, plan: Plan, Steps: Axis) -> list:
    """For each place within a step the weights of all steps, with the axis `steps` instead of `layers`."""

    def rows(leaf, slot: int):
        if not isinstance(leaf, NamedArray) or LAYERS not in {a.name for a in leaf.axes}:
            return leaf
        leaf = leaf.rearrange((LAYERS, ...))
        index = [row[slot] for row in plan.time_rows]
        stride = index[1] - index[0] if len(index) > 1 else 1
        if index != list(range(index[0], index[0] + stride * len(index), stride)):
            raise AssertionError("stage times of a uniform grid form an arithmetic progression")
        array = leaf.array if len(index) == leaf.array.shape[0] else leaf.array[index[0] : index[-1] + 1 : stride]
        return hax.named(array, (Steps, *leaf.axes[1:]))

    return [jax.tree.map(lambda a, s=s: rows(a, s), stacked, is_leaf=_is_named) for s in range(len(plan.places))]


def _has_steps(leaf) -> bool:
    return isinstance(leaf, NamedArray) and STEPS in {a.name for a in leaf.axes}


def _is_named(leaf) -> bool:
    return isinstance(leaf, NamedArray)


def _is_none(leaf) -> bool:
    return leaf is None
