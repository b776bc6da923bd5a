"""Diagonal linear state-space recurrences along positions: one step, the plain loop, and the selective chunked form.

    dh/ds = A h + B x,  y = C h,   held constant over steps of length Delta (zero-order hold):
    h_k = exp(Delta_k A) h_{k-1} + Delta_k phi(Delta_k A) B_k x_k,   y_k = C_k h_k,   phi(z) = (exp(z) - 1) / z

This is exact: (exp(Delta A) - 1)/A = Delta phi(Delta A), also where A is 0. Everything here works on plain arrays

    A [state, embed] <= 0,  x, y [batch, position, embed],  start [batch, position] bool,  state [batch, state, embed]
    time-invariant: Delta [embed],                  B, C [state, embed]
    selective:      Delta [batch, position, embed], B, C [batch, position, state]

in their own dtype (callers pass float32). Where `start` is true a new document begins: h_{k-1} counts as 0.

Sources: Gu & Dao, Mamba (arXiv 2312.00752), eq. 2 and 4 and algorithms 1 and 2.
Differs from Mamba's code: B is held exactly, not by the approximation Delta B.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Positions that are handled at once: {batch, chunk, state, embed} is in memory, not {batch, position, state, embed}.
# On 2 CPU cores 8 to 16 is fastest (the chunk stays in the cache); a device with many cores wants more at once.
CPU_CHUNK, DEVICE_CHUNK = 16, 64


def exponentials(z):
    """exp(z), phi(z) = (exp(z) - 1)/z and phi'(z) = (exp(z) - phi(z))/z, the last two by series where |z| < 1/4.

    Accurate to about 3e-7, relatively, for every z <= 0 including 0. One exponential: `expm1` costs more on CPU.
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
    """One position: (state, y). x, and delta unless constant: [batch, 1, embed]; B, C: broadcastable to the state
    [batch, state, embed]."""
    keep, phi = hold(delta * A)
    state = keep * state + delta * phi * B * x
    return state, jnp.sum(C * state, axis=-2)


def sequential(delta, A, B, C, x, start):
    """y by one `step` after another: the reference for the parallel forms."""
    selective = delta.ndim == 3

    def body(state, now):
        x, start, *rest = now
        d, b, c = (rest[0][:, None], rest[1][..., None], rest[2][..., None]) if selective else (delta, B, C)
        return step(jnp.where(start[:, None, None], 0.0, state), d, A, b, c, x[:, None])

    moving = (x, start, delta, B, C) if selective else (x, start)
    state = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    _, y = lax.scan(body, state, tuple(jnp.moveaxis(a, 1, 0) for a in moving))
    return jnp.moveaxis(y, 0, 1)


def continued(state, delta, A, B, C, x, real):
    """From `state`, one `step` after another: (state, y). Where `real` [batch, position] is false nothing happens."""
    selective = delta.ndim == 3

    def body(state, now):
        x, real, *rest = now
        d, b, c = (rest[0][:, None], rest[1][..., None], rest[2][..., None]) if selective else (delta, B, C)
        new, y = step(state, d, A, b, c, x[:, None])
        return jnp.where(real[:, None, None], new, state), y

    moving = tuple(jnp.moveaxis(a, 1, 0) for a in ((x, real, delta, B, C) if selective else (x, real)))
    if x.shape[1] == 1:  # no loop around a single position
        state, y = body(state, tuple(a[0] for a in moving))
        return state, y[:, None]
    state, y = lax.scan(body, state, moving)
    return state, jnp.moveaxis(y, 0, 1)


def selective(delta, A, B, C, x, start, chunk: int | None = None):
    """y of the selective recurrence, `chunk` positions in parallel, with a backward pass that stores only the state
    before each chunk: memory {batch, position / chunk, state, embed}."""
    if chunk is None:
        chunk = CPU_CHUNK if jax.default_backend() == "cpu" else DEVICE_CHUNK
    length = x.shape[1]
    chunk = min(chunk, length)
    # Padding leaves the state alone: Delta = 0 gives h_k = h_{k-1}.
    extra = -length % chunk
    padded = [jnp.pad(a, ((0, 0), (0, extra), *((0, 0),) * (a.ndim - 2))) for a in (delta, B, C, x, start)]
    chunks = [jnp.moveaxis(a, 1, 0).reshape(-1, chunk, a.shape[0], *a.shape[2:]) for a in padded]
    y = _chunked(A, *chunks[:4], 1 - chunks[4].astype(x.dtype))
    return jnp.moveaxis(y.reshape(-1, *y.shape[2:]), 0, 1)[:, :length]


# Below, arrays are {chunks, chunk, batch, ...} and within a chunk {chunk, batch, state, embed}.


@jax.custom_vjp
def _chunked(A, delta, B, C, x, link):
    return _chunked_forward(A, delta, B, C, x, link)[0]


def _chunked_forward(A, delta, B, C, x, link):
    def body(state, now):
        delta, B, C, x, link = now
        *_, states = _states(state, A, delta, B, x, link)
        return states[-1], (jnp.einsum("qbn,qbnd->qbd", C, states), state)

    state = jnp.zeros((x.shape[2], *A.shape), x.dtype)
    _, (y, before) = lax.scan(body, state, (delta, B, C, x, link))
    return y, (A, delta, B, C, x, link, before)


def _states(state, A, delta, B, x, link):
    """For one chunk: the exponentials of Delta A, the factor of h_{k-1}, and all states."""
    delta = delta[:, :, None, :]
    exp, phi, slope = exponentials(delta * A)
    keep = exp * link[..., None, None]
    new = delta * phi * B[..., None] * x[:, :, None, :]
    new = new.at[0].add(keep[0] * state)
    return exp, phi, slope, keep, _accumulate(keep, new)


def _accumulate(keep, new):
    """h_k = keep_k h_{k-1} + new_k along the first axis, h_{-1} = 0; each h_k sees entries up to k only."""
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, new))[1]


def _chunked_backward(saved, y_bar):
    """The adjoint runs backwards: g_k = C_k y_bar_k + keep_{k+1} g_{k+1}."""
    A, delta, B, C, x, link, before = saved

    def body(carry, now):
        from_later, A_bar = carry
        delta, B, C, x, link, state, y_bar = now
        exp, phi, slope, keep, states = _states(state, A, delta, B, x, link)
        earlier = jnp.concatenate([state[None], states[:-1]]) * link[..., None, None]
        new = (C[..., None] * y_bar[:, :, None, :]).at[-1].add(from_later)
        later_keep = jnp.concatenate([keep[1:], jnp.ones_like(keep[:1])])
        g = _accumulate(later_keep[::-1], new[::-1])[::-1]
        delta, input = delta[:, :, None, :], B[..., None] * x[:, :, None, :]
        delta_bar = jnp.sum(g * exp * (A * earlier + input), axis=2)  # d/dDelta of (exp(Delta A) - 1)/A is exp(Delta A)
        A_terms = g * delta * (exp * earlier + delta * slope * input)
        A_bar = A_bar + sum(A_terms[k] for k in range(len(A_terms)))
        taken = g * delta * phi
        x_bar = jnp.einsum("qbn,qbnd->qbd", B, taken)
        B_bar = jnp.einsum("qbnd,qbd->qbn", taken, x)
        C_bar = jnp.einsum("qbnd,qbd->qbn", states, y_bar)
        return (keep[0] * g[0], A_bar), (delta_bar, B_bar, C_bar, x_bar)

    start = (jnp.zeros_like(before[0]), jnp.zeros_like(before[0]))
    (_, A_bar), bars = lax.scan(body, start, (delta, B, C, x, link, before, y_bar), reverse=True)
    return A_bar.sum(axis=0), *bars, jnp.zeros_like(link)


_chunked.defvjp(_chunked_forward, _chunked_backward)
