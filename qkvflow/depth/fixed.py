"""Fixed-step integration in depth: one scan over the steps, each an explicit Runge-Kutta step.

The weights W(t) come in one of two ways, with the same numbers:
- `batched`: at all distinct stage times in one product before the scan; stores what an ordinary transformer stores;
- `in_scan`: inside each step; stores the weights of one step and computes them again in the backward pass.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS, STEPS
from qkvflow.depth import reversible
from qkvflow.depth.grid import StepGrid
from qkvflow.depth.jitter import jittered
from qkvflow.depth.plan import AbstractPlan, At, Field, Solution, Watch
from qkvflow.depth.steps import advance, increment, read, start
from qkvflow.errors import UserError
from qkvflow.named import is_named
from qkvflow.time import GridPoint, grid

_SHORTEST = 1e-6  # of the steps of a jittered grid, one may have no length
# Times that the backward pass evaluates the field again
RECOMPUTED = {"direct": 0, "selective": 1, "checkpoint": 1, "reversible": 1}
# Attention's own have batch axes, and are cheaper to compute again than to keep (Korthikanti et al., arXiv 2205.05198).
_PRODUCTS_WITH_WEIGHTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@dataclass(frozen=True)
class FixedPlan(AbstractPlan):
    """Steps of equal length, known beforehand.

    Attributes:
        grid: where the stages of the steps stand.
        step: the length h of a step as the state sees it (1/L, or 1 for plain residuals).
        adjoint: checkpoint, selective, direct or reversible. evaluate: batched or in_scan.
        jitter: the grid is warped at random in each solve (see `qkvflow.depth.jitter`); `times` are those of no warp.
    """

    grid: StepGrid
    step: float
    adjoint: str = "checkpoint"
    evaluate: str = "batched"
    jitter: bool = False

    def __post_init__(self):
        coupling = self.grid.coupling
        if self.adjoint == "reversible" and coupling is None:
            raise AssertionError("the reversible adjoint walks back the reversible scheme, which has a coupling")
        if coupling is not None and not 0.0 < coupling <= 1.0:
            raise UserError(f"coupling must lie in (0, 1], got {coupling}. The usual value is 0.99.")

    def solve(
        self,
        field: Field,
        at: At,
        params,
        x: NamedArray,
        *,
        args=None,
        key=None,
        trajectory: bool = False,
        kinetic: bool = False,
        watch: Watch | None = None,
        grid_key=None,
    ) -> Solution:
        """See `AbstractPlan.solve`. One mask of dropout per step, shared by its stages: the field is a function within
        a step. The trajectory has one state for each step.

        Args:
            grid_key: jitter is drawn as if `key` were this.
        """
        return _solve(self, field, at, params, x, args, key, trajectory, kinetic, watch, grid_key)

    @property
    def steps(self) -> int:
        return self.grid.steps

    @property
    def times(self) -> tuple[float, ...]:
        return self.grid.times

    @property
    def field_step(self) -> float:
        return self.step if self.grid.tableau.stages == 1 else 0.0

    @property
    def evaluations(self) -> int:
        return self.grid.evaluations

    @property
    def recomputed(self) -> int:
        return RECOMPUTED[self.adjoint] * self.evaluations

    @property
    def keeps_products(self) -> bool:
        return self.adjoint == "selective"

    @property
    def weight_evaluations(self) -> int:
        return len(self.times) if self.evaluate == "batched" else self.steps * len(self.grid.places)


def _solve(
    plan: FixedPlan,
    field: Field,
    at: At,
    params,
    x: NamedArray,
    args,
    key,
    trajectory: bool,
    kinetic: bool,
    watch: Watch | None,
    grid_key,
) -> Solution:
    Steps = Axis(STEPS, plan.steps)
    times, lengths = None, None
    if plan.jitter:
        k_grid, key = jax.random.split(key)
        if grid_key is not None:
            k_grid, _ = jax.random.split(grid_key)
        times, lengths = jittered(plan.grid, k_grid)
    rows = _Rows(
        weights=None,
        indices=jnp.asarray(plan.grid.time_rows),
        key=jax.random.split(key, plan.steps) if key is not None else None,
        length=lengths,
        number=jnp.arange(plan.steps) if watch is not None else None,
    )
    shared = _Shared(params, args, times, None)
    if plan.evaluate == "batched":
        stacked = at(params, grid(plan.times) if times is None else times)
        slots = _slots(stacked, plan, Steps)
        per_step, unstacked = eqx.partition(slots, _has_steps, is_leaf=is_named)
        rows = eqx.tree_at(lambda r: r.weights, rows, per_step, is_leaf=_is_none)
        # Everything that the steps need is there: without `params` no gradient of them is carried along.
        shared = _Shared(None, args, None, unstacked)

    def psi(x: NamedArray, shared: _Shared, row: _Rows, backward: bool) -> NamedArray:
        def evaluate(slot: int, state: NamedArray) -> NamedArray:
            dx = field(_weights(slot, shared, row, plan, at), state.astype(dtype), shared.args, row.key)
            return dx.astype(state.dtype)

        return increment(evaluate, x, plan.grid, plan.step if row.length is None else row.length, backward=backward)

    dtype, coupling = x.dtype, plan.grid.coupling
    if plan.adjoint == "reversible" and not (trajectory or kinetic or watch is not None):
        return Solution(reversible.integrate(psi, x, shared, rows, Steps, coupling))

    def step(before, row: _Rows):
        if watch is not None:
            watch.begin(row.number)
        after = advance(lambda x, backward: psi(x, shared, row, backward), before, coupling)
        after, seen = (after, None) if watch is None else _watched(watch, after, dtype)
        moved = (read(after, jnp.float32) - read(before, jnp.float32)).array.astype(jnp.float32) if kinetic else None
        duration = 1 / plan.steps if row.length is None else jnp.maximum(row.length, _SHORTEST)
        energy = jnp.mean(jnp.square(moved)) / duration if kinetic else None
        return after, (read(after, dtype) if trajectory else None, energy, seen)

    # In a trajectory of the reversible scheme gradients are those of `checkpoint`: equal, and with its memory.
    is_whole = plan.adjoint in ("checkpoint", "reversible")
    if plan.keeps_products:
        step = eqx.filter_checkpoint(step, policy=_PRODUCTS_WITH_WEIGHTS, prevent_cse=False)
    end, (states, energies, seen) = hax.scan(step, Steps, remat=is_whole)(start(x, coupling), rows)
    states = states.rename({STEPS: LAYERS}) if trajectory else None
    if watch is not None:
        watch.keep(seen)
    return Solution(read(end, dtype), states, kinetic=jnp.sum(energies) if kinetic else None)


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
    number: jax.Array | None  # of the step, where somebody watches


def _watched(watch: Watch, state, dtype):
    """The state after a step as it goes on, and what was seen. A change of x moves both states of a pair."""
    x = read(state, dtype)
    changed, seen = watch.end(x)
    if changed is x:
        return state, seen
    if isinstance(state, NamedArray):
        return changed, seen
    return tuple(part + (changed.astype(part.dtype) - x.astype(part.dtype)) for part in state), seen


def _weights(slot: int, shared: _Shared, row: _Rows, plan: FixedPlan, at: At):
    if plan.evaluate == "batched":
        return eqx.combine(row.weights[slot], shared.unstacked[slot], is_leaf=is_named)
    index = row.indices[slot]
    if plan.keeps_products:
        at = eqx.filter_checkpoint(at)  # W(t) is made of products, too: those of all steps are not kept
    return at(shared.params, GridPoint(plan.times, index) if shared.times is None else shared.times.array[index])


def _slots(stacked, plan: FixedPlan, Steps: Axis) -> list:
    """For each place within a step the weights of all steps, with the axis `steps` instead of `layers`."""

    def rows(leaf, slot: int):
        if not isinstance(leaf, NamedArray) or LAYERS not in {a.name for a in leaf.axes}:
            return leaf
        leaf = leaf.rearrange((LAYERS, ...))
        index = [row[slot] for row in plan.grid.time_rows]
        stride = index[1] - index[0] if len(index) > 1 else 1
        if index != list(range(index[0], index[0] + stride * len(index), stride)):
            raise AssertionError("stage times of a uniform grid form an arithmetic progression")
        array = leaf.array if len(index) == leaf.array.shape[0] else leaf.array[index[0] : index[-1] + 1 : stride]
        return hax.named(array, (Steps, *leaf.axes[1:]))

    return [jax.tree.map(lambda a, s=s: rows(a, s), stacked, is_leaf=is_named) for s in range(len(plan.grid.places))]


def _has_steps(leaf) -> bool:
    return isinstance(leaf, NamedArray) and STEPS in {a.name for a in leaf.axes}


def _is_none(leaf) -> bool:
    return leaf is None
