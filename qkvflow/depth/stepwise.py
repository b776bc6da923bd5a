"""Fixed-step integration of a field with memory: unrolled, each evaluation of the field with its own memory.

The program contains the steps one after another, with separate weight arrays for each. In a scan, XLA would first copy
the weights and the memory of a step out of the stacked arrays, which on a CPU costs several times as much as the field
itself for a single new token.
"""

from collections.abc import Callable, Sequence
from typing import Any

from haliax import NamedArray

from qkvflow.depth.fixed import FixedPlan
from qkvflow.depth.steps import advance, increment, read, start


def integrate_with_memory(
    field: Callable[[Any, NamedArray, Any, Any], tuple[NamedArray, Any]],
    weights: Sequence,
    x: NamedArray,
    plan: FixedPlan,
    memory: Sequence,
    *,
    args=None,
) -> tuple[NamedArray, tuple]:
    """x(1) from x(0) = `x`, and the memory after it; the numbers of `plan.solve`.

    Args:
        field: (weights, x, args, memory) -> (dx/dt, memory).
        weights: for each of `plan.times`.
        memory: for each of the `plan.evaluations`, in the order in which they are made.
    """
    dtype = x.dtype
    after: list = []
    state = start(x, plan.grid.coupling)
    for rows in plan.grid.time_rows:

        def psi(x: NamedArray, backward: bool, rows=rows) -> NamedArray:
            def evaluate(slot: int, x: NamedArray) -> NamedArray:
                dx, remembered = field(weights[rows[slot]], x.astype(dtype), args, memory[len(after)])
                after.append(remembered)
                return dx.astype(x.dtype)

            return increment(evaluate, x, plan.grid, plan.step, backward=backward)

        state = advance(psi, state, plan.grid.coupling)
    return read(state, dtype), tuple(after)
