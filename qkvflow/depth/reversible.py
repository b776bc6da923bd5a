"""`adjoint: reversible`: exact gradients whose memory does not grow with the number of steps.

The forward pass keeps the last pair (y_L, z_L) only; the backward pass walks the reversible scheme of
`qkvflow.depth.steps` back and differentiates each step where it stands:

    z_n = z_{n+1} + Psi_{-h}(t_{n+1}, y_{n+1}),    y_n = (y_{n+1} - (1 - l) z_n - Psi_h(t_n, z_n)) / l

Each increment that is evaluated to step back is also the one to differentiate, so a step costs 2 increments forward, 2
forward again and 2 backward: twice `checkpoint` of the plain scheme, as much as `checkpoint` of this one. Exact up to
rounding: errors of the walk grow by 1/l per step, so the pair is kept in float32 or better. Source: McCallum and Foster
(arXiv 2410.11648), algorithms 1 and 2.
"""

from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.depth.steps import Pair, forward, pair_dtype
from qkvflow.named import is_named


def integrate(psi: Callable, x: NamedArray, shared, rows, Steps: Axis, coupling: float) -> NamedArray:
    """x(1) from x(0) = `x`; gradients for `x` and all floating point arrays of `shared` and `rows`.

    Args:
        psi: (x, shared, row, backward) -> increment.
        rows: what a step reads, stacked along `Steps`.
    """
    differentiable, rest = eqx.partition((shared, rows), _is_float, is_leaf=is_named)
    return _solve((x, differentiable), rest, psi, Steps, coupling)


@eqx.filter_custom_vjp
def _solve(inputs, rest, psi: Callable, Steps: Axis, coupling: float) -> NamedArray:
    return _walk(inputs, rest, psi, Steps, coupling)[0].astype(inputs[0].dtype)


def _walk(inputs, rest, psi: Callable, Steps: Axis, coupling: float) -> Pair:
    x, differentiable = inputs
    shared, rows = eqx.combine(differentiable, rest, is_leaf=is_named)

    def step(pair: Pair, row) -> Pair:
        return forward(lambda x, backward: psi(x, shared, row, backward), pair, coupling)

    return hax.fold(step, Steps)((x.astype(pair_dtype(x.dtype)),) * 2, rows)


@_solve.def_fwd
def _solve_forward(perturbed, inputs, rest, psi, Steps, coupling):
    del perturbed
    pair = _walk(inputs, rest, psi, Steps, coupling)
    return pair[0].astype(inputs[0].dtype), pair


@_solve.def_bwd
def _solve_backward(pair: Pair, gradient, perturbed, inputs, rest, psi, Steps, coupling):
    del perturbed
    x, (shared, rows) = inputs
    rest_shared, rest_rows = rest

    def step_back(carry, row, rest_row):
        (y, z), (dy, dz), d_shared = carry

        def increment(x, shared, row, backward: bool):
            shared = eqx.combine(shared, rest_shared, is_leaf=is_named)
            return psi(x, shared, eqx.combine(row, rest_row, is_leaf=is_named), backward)

        back, pull = jax.vjp(lambda *a: increment(*a, True), y, shared, row)
        z = z + back
        from_y, *d_back = pull(-dz)
        dy = dy + from_y
        ahead, pull = jax.vjp(lambda *a: increment(*a, False), z, shared, row)
        y = (y - z * (1.0 - coupling) - ahead) * (1.0 / coupling)
        from_z, *d_ahead = pull(dy)
        # y_{n+1} = couple(y_n, z_n) + Psi(z_n): the gradient reaches y_n by l and z_n by 1 - l and by Psi.
        dy, dz = dy * coupling, dz + from_z + dy * (1.0 - coupling)
        return ((y, z), (dy, dz), _add(d_shared, d_back[0], d_ahead[0])), _add(d_back[1], d_ahead[1])

    dy = gradient.astype(pair[0].dtype)
    start = (pair, (dy, hax.zeros_like(dy)), jax.tree.map(jnp.zeros_like, shared))
    (_, (dy, dz), d_shared), d_rows = hax.scan(step_back, Steps, reverse=True)(start, rows, rest_rows)
    return (dy + dz).astype(x.dtype), (d_shared, d_rows)


def _add(first, *others):
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), first, *others)


def _is_float(leaf) -> bool:
    return eqx.is_inexact_array(leaf.array if isinstance(leaf, NamedArray) else leaf)
