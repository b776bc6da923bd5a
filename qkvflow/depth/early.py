"""Fixed-step integration with memory in which each token can stop early: from then on its state stays fixed.

The field still sees the states that stay, for what it puts into its memory: later tokens read it. What else an
evaluation would give is left out as soon as no token of the batch moves. Memories are written outside that branch: by
the same kernels for tokens that move and those that stay, and in place, where XLA would copy them into and out of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
from haliax import NamedArray

from qkvflow.depth.fixed import FixedPlan
from qkvflow.depth.steps import advance, increment, read, start
from qkvflow.named import is_named


def integrate_until_exit(
    remember: Callable[[Any, NamedArray, Any, Any], tuple[Any, Any]],
    field: Callable[[Any, NamedArray, Any, Any], NamedArray],
    weights: Sequence,
    x: NamedArray,
    plan: FixedPlan,
    memory: Sequence,
    going: NamedArray,
    leaves: Callable[[int, NamedArray, NamedArray, NamedArray], NamedArray],
    *,
    min_steps: int = 1,
    args=None,
) -> tuple[NamedArray, tuple, NamedArray]:
    """x(1), the memory after it, and the steps that each token has made.

    Args:
        remember: (weights, x, args, memory) -> the memory with the positions of x, and what `field` reads.
        field: (weights, x, args, what it reads) -> dx/dt.
        weights, memory: as of `integrate_with_memory`.
        going: {batch, position} bool, false for tokens that nobody asks for.
        leaves: (steps made, tokens that go on, x before the last step, x after it) -> {batch, position} bool, which of
            them stop there.
        min_steps: that every token makes; `leaves` may ask for more.
    """
    dtype, coupling = x.dtype, plan.grid.coupling
    state, after = start(x, coupling), []
    steps = going.astype("int32") * 0

    for k, rows in enumerate(plan.grid.time_rows):
        before, some_go = read(state, dtype), hax.any(going).array

        def psi(x: NamedArray, backward: bool, rows=rows, k=k, now=(before, going, some_go)) -> NamedArray:
            before, going, some_go = now

            def evaluate(slot: int, x: NamedArray) -> NamedArray:
                seen = x.astype(dtype) if k < min_steps else _where(going, x.astype(dtype), before)
                remembered, read_from = remember(weights[rows[slot]], seen, args, memory[len(after)])
                after.append(remembered)

                def move(seen, memory):
                    return field(weights[rows[slot]], seen, args, memory).rearrange(seen.axes)

                def stay(seen, memory):
                    return hax.zeros_like(seen)

                dx = move(seen, read_from) if k < min_steps else jax.lax.cond(some_go, move, stay, seen, read_from)
                return dx.astype(x.dtype)

            return increment(evaluate, x, plan.grid, plan.step, backward=backward)

        moved = advance(psi, state, coupling)
        steps = steps + going.astype("int32")
        if k >= min_steps:
            moved = jax.tree.map(lambda new, old, g=going: _where(g, new, old), moved, state, is_leaf=is_named)
        if min_steps <= k + 1 < plan.steps:
            going = going & ~leaves(k + 1, going, before, read(moved, dtype))
        state = moved
    return read(state, dtype), tuple(after), steps


def _where(going: NamedArray, new: NamedArray, old: NamedArray) -> NamedArray:
    return hax.where(going, new, old).rearrange(new.axes)
