"""Fixed-step integration with memory in which each token stops on its own: from then on its state stays as it is.

The field is still evaluated at the states that stay, for what it puts into its memory: later tokens read it. What else
an evaluation would give is left out as soon as no token of the batch moves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
from haliax import NamedArray

from qkvflow.depth.fixed import FixedPlan
from qkvflow.depth.steps import advance, increment, read, start


def integrate_until_exit(
    field: Callable[[Any, NamedArray, Any, Any], tuple[NamedArray, Any]],
    weights: Sequence,
    x: NamedArray,
    plan: FixedPlan,
    memory: Sequence,
    going: NamedArray,
    leaves: Callable[[int, NamedArray, NamedArray], NamedArray],
    *,
    min_steps: int = 1,
    args=None,
) -> tuple[NamedArray, tuple, NamedArray]:
    """x(1), the memory after it, and the steps that each token has made.

    Args:
        field, weights, memory: as of `integrate_with_memory`.
        going: {batch, position} bool, false for tokens that nobody asks for.
        leaves: (steps made, x before the last of them, x after it) -> {batch, position} bool, which tokens stop there.
        min_steps: that every token makes.
    """
    dtype, coupling = x.dtype, plan.grid.coupling
    each = plan.evaluations // plan.steps
    state, after = start(x, coupling), []
    steps = going.astype("int32") * 0

    def step(k: int, state, own: tuple, going: NamedArray | None):
        """The state and the memory after step k. going: None if all go, else states of others stay."""
        before, kept = read(state, dtype), []

        def psi(x: NamedArray, backward: bool) -> NamedArray:
            def evaluate(slot: int, x: NamedArray) -> NamedArray:
                x = x.astype(dtype)
                seen = x if going is None else _where(going, x, before)
                dx, remembered = field(weights[plan.grid.time_rows[k][slot]], seen, args, own[len(kept)])
                kept.append(remembered)
                return dx.astype(x.dtype)

            return increment(evaluate, x, plan.grid, plan.step, backward=backward)

        moved = advance(psi, state, coupling)
        if going is not None:
            moved = jax.tree.map(lambda new, old: _where(going, new, old), moved, state, is_leaf=_is_named)
        return moved, tuple(kept)

    for k in range(plan.steps):
        own = tuple(memory[k * each : (k + 1) * each])
        all_go, may_leave = k < min_steps, min_steps <= k + 1 < plan.steps

        def move(state, going, own, k=k, all_go=all_go, may_leave=may_leave):
            moved, kept = step(k, state, own, None if all_go else going)
            if may_leave:
                going = going & ~leaves(k + 1, read(state, dtype), read(moved, dtype)).rearrange(going.axes)
            return moved, going, kept

        def stay(state, going, own, k=k):
            return state, going, step(k, state, own, hax.zeros_like(going))[1]

        steps = steps + going.astype("int32")
        if all_go:
            state, going, own = move(state, going, own)
        else:
            state, going, own = jax.lax.cond(hax.any(going).array, move, stay, state, going, own)
        after += own
    return read(state, dtype), tuple(after), steps


def _where(going: NamedArray, new: NamedArray, old: NamedArray) -> NamedArray:
    return hax.where(going, new, old).rearrange(new.axes)


def _is_named(leaf) -> bool:
    return isinstance(leaf, NamedArray)
