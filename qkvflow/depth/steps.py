"""One step in depth, as an increment of the state, and the two schemes made of increments.

Increment of an explicit Runge-Kutta method from t_n, for a step of length h (or -h, backwards from t_{n+1}):

    Psi_h(t_n, x) = h sum_i b_i k_i,    k_i = f(t_n + c_i h, x + h sum_j a_ij k_j)

Plain scheme:       x_{n+1} = x_n + Psi_h(t_n, x_n)
Reversible scheme:  y_{n+1} = l y_n + (1 - l) z_n + Psi_h(t_n, z_n)
                    z_{n+1} = z_n - Psi_{-h}(t_{n+1}, y_{n+1}),          y_0 = z_0 = x(0), x(1) = y_L

The second one can be solved for (y_n, z_n), whatever f is, and converges at the order of Psi. The coupling l in (0, 1]
draws y and z together; errors of rounding grow by 1/l per step when the steps are walked back.
Source: McCallum and Foster, Efficient, Accurate and Stable Gradients for Neural ODEs (arXiv 2410.11648), equation 5.
Differs from the source: Euler looks back at the time that it saw going forward, so that one grid of L times serves
both; the order stays 1.
"""

from collections.abc import Callable

import jax.numpy as jnp
from haliax import NamedArray

from qkvflow.depth.grid import StepGrid

Pair = tuple[NamedArray, NamedArray]


def increment(evaluate: Callable, x: NamedArray, grid: StepGrid, h, *, backward: bool = False) -> NamedArray:
    """Psi_h(t_n, x), or with `backward` Psi_{-h}(t_{n+1}, x).

    Args:
        evaluate: (slot, x) -> f at the time of that slot of the step.
        h: length of the step, a number or an array without axes.
    """
    slots, h = (grid.backward_slots, -h) if backward else (grid.stage_slots, h)
    ks: list[NamedArray] = []
    for a_i, slot in zip(grid.tableau.a, slots, strict=True):
        ahead = _combine(a_i, ks)
        ks.append(evaluate(slot, x if ahead is None else (x + _scale(ahead, h)).astype(x.dtype)))
    total = _combine(grid.tableau.b, ks)
    assert total is not None, "a method has at least one stage with a weight"
    return _scale(total, h).astype(x.dtype)


def advance(psi: Callable, state, coupling: float | None):
    """The state after a step: of the plain scheme, or with a `coupling` the pair of the reversible one.

    Args:
        psi: (x, backward) -> increment.
    """
    return state + psi(state, False) if coupling is None else forward(psi, state, coupling)


def start(x: NamedArray, coupling: float | None):
    """The state of the scheme at t = 0."""
    return x if coupling is None else (x.astype(pair_dtype(x.dtype)),) * 2


def read(state, dtype) -> NamedArray:
    """x from the state of the scheme, in this precision."""
    return (state if isinstance(state, NamedArray) else state[0]).astype(dtype)


def forward(psi: Callable, pair: Pair, coupling: float) -> Pair:
    """(y_n, z_n) -> (y_{n+1}, z_{n+1}).

    Args:
        psi: (x, backward) -> increment.
    """
    y, z = pair
    y = _couple(y, z, coupling) + psi(z, False)
    return y, z - psi(y, True)


def _couple(y: NamedArray, z: NamedArray, coupling: float) -> NamedArray:
    """l y + (1 - l) z."""
    return y * coupling + z * (1.0 - coupling)


def pair_dtype(dtype):
    """The precision of the pair, at least float32: what is rounded away cannot be recovered when stepping back."""
    return jnp.promote_types(dtype, jnp.float32)


def _combine(coefficients, ks: list[NamedArray]) -> NamedArray | None:
    total = None
    for c, k in zip(coefficients, ks, strict=False):
        if c != 0.0:
            term = k * c if c != 1.0 else k
            total = term if total is None else total + term
    return total


def _scale(k: NamedArray, h) -> NamedArray:
    return k if isinstance(h, float) and h == 1.0 else k * h
