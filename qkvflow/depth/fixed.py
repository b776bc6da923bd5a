"""Fixed-step integration in depth: one scan over the steps, each an explicit Runge-Kutta step.

The weights W(t) come in one of two ways, with the same numbers:
- `batched`: at all distinct stage times in one product before the scan; stores what an ordinary transformer stores;
- `in_scan`: inside each step; stores the weights of one step and computes them again in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS, STEPS
from qkvflow.depth.plan import Plan
from qkvflow.time import GridPoint, grid

Field = Callable[[Any, NamedArray, Any], NamedArray]


def integrate(field: Field, at: Callable, x: NamedArray, plan: Plan, *, key=None, trajectory: bool = False):
    """x(1) from x(0) = `x` under dx/dt = field(W(t), x, key).

    Args:
        field: the vector field; its first argument is what `at` returns, its last a key or None.
        at: t -> W(t); takes a `Grid` (an axis `layers`) or a `GridPoint`. Gradients flow through what it closes over.
        x: the state, NamedArray; its dtype is kept.
        key: for dropout. One mask per step, shared by the stages of the step: the field is a function within a step.
        trajectory: also return the states after each step, with the axis `layers` in front.
    Returns:
        x(1), or (x(1), states).
    """
    Steps = Axis(STEPS, plan.steps)
    rows = hax.named(jax.numpy.asarray(plan.time_rows), (Steps, "slot"))
    keys = jax.random.split(key, plan.steps) if key is not None else None
    batched = _slots(at(grid(plan.times)), plan, Steps) if plan.evaluate == "batched" else None

    def step(x: NamedArray, rows: NamedArray, keys, batched):
        def weights(slot: int):
            return batched[slot] if batched is not None else at(GridPoint(plan.times, rows["slot", slot].array))

        x = _runge_kutta(lambda slot, x: field(slot, x, keys), [weights(s) for s in range(len(plan.places))], x, plan)
        return x, (x if trajectory else None)

    remat = plan.adjoint == "checkpoint"
    x, states = hax.scan(step, Steps, remat=remat)(x, rows, keys, batched)
    return (x, states.rename({STEPS: LAYERS})) if trajectory else x


def _runge_kutta(field, weights: list, x: NamedArray, plan: Plan) -> NamedArray:
    tab, h = plan.tableau, plan.step
    ks: list[NamedArray] = []
    for a_i, slot in zip(tab.a, plan.stage_slots, strict=True):
        ks.append(field(weights[slot], _advance(x, h, a_i, ks)))
    return _advance(x, h, tab.b, ks)


def _advance(x: NamedArray, h: float, coefficients, ks: list[NamedArray]) -> NamedArray:
    terms = [(c, k) for c, k in zip(coefficients, ks, strict=False) if c != 0.0]
    if not terms:
        return x
    total = terms[0][1] * terms[0][0] if terms[0][0] != 1.0 else terms[0][1]
    for c, k in terms[1:]:
        total = total + k * c
    return (x + total * h if h != 1.0 else x + total).astype(x.dtype)


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

    is_array = lambda x: isinstance(x, NamedArray)  # noqa: E731
    return [jax.tree.map(lambda a, s=s: rows(a, s), stacked, is_leaf=is_array) for s in range(len(plan.places))]
