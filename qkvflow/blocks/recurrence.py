"""Diagonal linear state-space recurrences along positions: one step, and the plain loop.

    dh/ds = A h + B x,  y = C h,   held constant over steps of length Delta (zero-order hold):
    h_k = exp(Delta_k A) h_{k-1} + Delta_k phi(Delta_k A) B_k x_k,   y_k = C_k h_k,   phi(z) = (exp(z) - 1) / z

This is exact: (exp(Delta A) - 1)/A = Delta phi(Delta A), also where A is 0. Everything here works on plain arrays

    A [state, embed] <= 0,  x, y [batch, position, embed],  start [batch, position] bool,  state [batch, state, embed]
    time-invariant: Delta [embed],                  B, C [state, embed]
    selective:      Delta [batch, position, embed], B, C [batch, position, state]

in their own dtype (callers pass float32). Where `start` is true a new document begins: h_{k-1} counts as 0.
`qkvflow.blocks.chunked` computes the same faster.

Sources: Gu & Dao, Mamba (arXiv 2312.00752), eq. 2 and 4 and algorithms 1 and 2.
Differs from Mamba's code: B is held exactly, not by the approximation Delta B.
"""

import jax
import jax.numpy as jnp
from jax import lax


def exponentials(z):
    """exp(z), phi(z) = (exp(z) - 1)/z and phi'(z) = (exp(z) - phi(z))/z, the last two by series where |z| < 1/4.

    Accurate to about 5e-7, and phi' to 5e-6, relatively, for every z <= 0 including 0. One exponential: `expm1` costs
    more on CPU.
    """
    small = jnp.abs(z) < 0.25
    s = jnp.where(small, z, 0.0)
    inverse = 1 / jnp.where(small, 1.0, z)
    exp = jnp.exp(z)
    phi_series = 1 + s * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120 + s * (1 / 720 + s / 5040)))))
    slope_series = 1 / 2 + s * (1 / 3 + s * (1 / 8 + s * (1 / 30 + s * (1 / 144 + s / 840))))
    phi = jnp.where(small, phi_series, (exp - 1) * inverse)
    return exp, phi, jnp.where(small, slope_series, (exp - phi) * inverse)


@jax.custom_jvp
def hold(z):
    """(exp(z), phi(z)) for z = Delta A: a zero-order hold multiplies h by exp(z) and B x by Delta phi(z)."""
    return exponentials(z)[:2]


@hold.defjvp
def _hold_jvp(primals, tangents):
    exp, phi, slope = exponentials(*primals)
    return (exp, phi), (exp * tangents[0], slope * tangents[0])


def step(state, delta, A, B, C, x):
    """One position: (state, y).

    Args:
        x: [batch, 1, embed].
        delta, A, B, C: broadcastable to the state [batch, state, embed], and of its rank.
    """
    keep, phi = hold(delta * A)
    state = keep * state + delta * phi * B * x
    return state, jnp.sum(C * state, axis=-2)


def sequential(state, delta, A, B, C, x, start=None, real=None, every: bool = False):
    """From `state`, one `step` after another: (state, y). The reference for the fast forms, and what decoding runs.

    Args:
        start, real: [batch, position] bool. Where `real` is false nothing happens to the state.
        every: gives the states after all positions, [batch, position, state, embed], instead of the last one.
    """
    selective, A = delta.ndim == 3, A[None]
    constant = () if selective else (delta[None, None], B[None], C[None])

    def body(state, now):
        d, b, c = (now["delta"][:, None], now["B"][..., None], now["C"][..., None]) if selective else constant
        before = state if start is None else jnp.where(now["start"][:, None, None], 0.0, state)
        after, y = step(before, d, A, b, c, now["x"][:, None])
        after = after if real is None else jnp.where(now["real"][:, None, None], after, state)
        return after, (y, after if every else None)

    moving = {"x": x, "start": start, "real": real} | ({"delta": delta, "B": B, "C": C} if selective else {})
    moving = {name: jnp.moveaxis(array, 1, 0) for name, array in moving.items() if array is not None}
    if x.shape[1] == 1:  # no loop around a single position
        state, (y, _) = body(state, {name: array[0] for name, array in moving.items()})
        return state[:, None] if every else state, y[:, None]
    state, (y, states) = lax.scan(body, state, moving)
    return jnp.moveaxis(states, 0, 1) if every else state, jnp.moveaxis(y, 0, 1)
