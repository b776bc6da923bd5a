"""The selective state-space recurrence in a loop over positions, with a hand-written backward pass.

The automatic derivative of the same loop takes 2 to 3 times as long: it stores or moves more, and it sums the gradient
of A over the batch at every position. Here, with g_k the gradient of h_k and z = Delta_k A:

    g_k = C_k y_bar_k + exp(z_{k+1}) g_{k+1}
    Delta_bar = sum_n g exp(z) (A h_{k-1} + B x)        A_bar = sum_k g Delta (exp(z) h_{k-1} + Delta phi'(z) B x)
    x_bar = sum_n g Delta phi(z) B,   B_bar = sum_d g Delta phi(z) x,   C_bar = sum_d h y_bar

(d/dDelta of (exp(Delta A) - 1)/A is exp(Delta A).) Only the state before each chunk is stored; the states within a
chunk are computed again. Shapes and symbols as in `qkvflow.blocks.recurrence`; arrays are {chunks, chunk, batch, ...}.
"""

import jax
import jax.numpy as jnp
from jax import lax

from qkvflow.blocks.recurrence import exponentials


@jax.custom_vjp
def selective_loop(state, A, x, link, delta, B, C):
    """y from the state before the first position, {batch, state, embed}.

    Args:
        link: 0 where a document starts, else 1.
    """
    return _forward(state, A, x, link, delta, B, C)[0]


def _forward(state, A, x, link, delta, B, C):
    def position(h, now):
        *system, C = now
        h = _advance(h, A, *system)
        return h, jnp.einsum("bn,bnd->bd", C, h)

    def chunk(h, now):
        after, y = lax.scan(position, h, now)
        return after, (y, h)

    _, (y, before) = lax.scan(chunk, state, (x, link, delta, B, C))
    return y, (A, x, link, delta, B, C, before)


def _advance(h, A, x, link, delta, B):
    delta = delta[:, None, :]
    exp, phi, _ = exponentials(delta * A)
    return exp * (link[:, None, None] * h) + delta * phi * B[..., None] * x[:, None, :]


def _backward(saved, y_bar):
    A, x, link, delta, B, C, before = saved

    def position(carry, now):
        g, A_bar = carry
        x, link, delta, B, C, earlier, y_bar = now
        link, delta, input = link[:, None, None], delta[:, None, :], B[..., None] * x[:, None, :]
        exp, phi, slope = exponentials(delta * A)
        earlier = link * earlier
        h = exp * earlier + delta * phi * input
        g = g + C[..., None] * y_bar[:, None, :]
        delta_bar = jnp.sum(g * exp * (A * earlier + input), axis=1)
        A_bar = A_bar + g * delta * (exp * earlier + delta * slope * input)
        taken = g * delta * phi
        x_bar = jnp.einsum("bn,bnd->bd", B, taken)
        B_bar, C_bar = jnp.einsum("bnd,bd->bn", taken, x), jnp.einsum("bnd,bd->bn", h, y_bar)
        return (exp * link * g, A_bar), (x_bar, delta_bar, B_bar, C_bar)

    def chunk(carry, now):
        *system, C, before, y_bar = now
        _, earlier = lax.scan(lambda h, now: (_advance(h, A, *now), h), before, tuple(system))
        return lax.scan(position, carry, (*system, C, earlier, y_bar), reverse=True)

    zero = jnp.zeros_like(before[0])
    now = (x, link, delta, B, C, before, y_bar)
    (state_bar, A_bar), (x_bar, *bars) = lax.scan(chunk, (zero, zero), now, reverse=True)
    return state_bar, A_bar.sum(axis=0, keepdims=True), x_bar, jnp.zeros_like(link), *bars


selective_loop.defvjp(_forward, _backward)
