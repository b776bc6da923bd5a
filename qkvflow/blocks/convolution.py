"""The time-invariant state-space recurrence in parallel over positions: chunks of a convolution, and states between.

With a = exp(Delta A), b = (exp(Delta A) - 1)/A B, within a chunk of Q positions that starts with the state h:

    y_i = sum_{j <= i} K_{i-j} x_j + C a^{i+1} h,   K_l = sum_n C a^l b,      h' = a^Q h + sum_j a^{Q-1-j} b x_j

The sum over j is Q shifted products; both terms with h are matrix products for each channel. Only the states between
chunks are stored: {batch, position / Q, state, embed}. Shapes and symbols as in `qkvflow.blocks.recurrence`.

A new document (`start`) cuts these sums: only pairs (i, j) of one document count, h reaches the first document of a
chunk only, and h' comes from its last one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from qkvflow.blocks.recurrence import hold

CHUNK = 16  # fastest of 8, 16, 32 on CPU, forward and backward


def time_invariant(delta, A, B, C, x, start, chunk: int = CHUNK):
    """y [batch, position, embed] of the recurrence with constant Delta [embed] and B, C [state, embed]."""
    batch, length, embed = x.shape
    chunk = min(chunk, length)
    extra = -length % chunk
    x = jnp.pad(x, ((0, 0), (0, extra), (0, 0)))
    document = jnp.cumsum(jnp.pad(start, ((0, 0), (0, extra))).astype(jnp.int32), axis=1).reshape(batch, -1, chunk)

    take = delta * hold(delta * A)[1] * B
    power = jnp.exp(jnp.arange(chunk + 1)[:, None, None] * (delta * A))  # a^0 .. a^Q: [power, state, embed]
    inside = _convolve(jnp.einsum("qnd,nd->qd", power[:-1], C * take), x, document)

    last = document[:, :, -1]
    before = jnp.concatenate([document[:, :1, 0], last[:, :-1]], axis=1)  # the document that the state h belongs to
    chunks = x.reshape(batch, -1, chunk, embed)
    to_end = jnp.where((document == last[..., None])[..., None], chunks, 0.0)
    added = jnp.einsum("qnd,bcqd->cdnb", power[chunk - 1 :: -1] * take, to_end)
    decay = power[chunk].T[..., None]
    unbroken = (before == last).T[:, None, None, :]

    def body(state, now):
        added, unbroken = now
        return jnp.where(unbroken, decay * state, 0.0) + added, state

    _, states = lax.scan(body, jnp.zeros_like(added[0]), (added, unbroken))
    reached = jnp.einsum("qnd,cdnb->bcqd", power[1:] * C, states)
    outside = jnp.where((document == before[..., None])[..., None], reached, 0.0)
    return (inside + outside.reshape(x.shape))[:, :length]


@jax.custom_vjp
def _convolve(kernel, x, document):
    """sum_l kernel[l] x[k - l], l within the chunk and the document. kernel [chunk, embed], x [batch, position, embed],
    document [batch, chunks, chunk]."""
    chunk, length = kernel.shape[0], x.shape[1]
    place = jnp.arange(length) % chunk
    document = document.reshape(x.shape[:2])
    earlier = jnp.pad(x, ((0, 0), (chunk - 1, 0), (0, 0)))
    earlier_document = jnp.pad(document, ((0, 0), (chunk - 1, 0)), constant_values=-1)
    y = jnp.zeros_like(x)
    for lag in range(chunk):
        first = chunk - 1 - lag
        same = (place >= lag) & (document == earlier_document[:, first : first + length])
        y = y + jnp.where(same[..., None], kernel[lag] * earlier[:, first : first + length], 0.0)
    return y


def _convolve_forward(kernel, x, document):
    return _convolve(kernel, x, document), (kernel, x, document)


def _convolve_backward(saved, y_bar):
    """The adjoint in x is the same convolution backwards. For the one in the kernel, the products are summed over the
    places of a chunk first, then over the chunks by a matrix product, one sequence after another: without the loop XLA
    on CPU computes y_bar anew for each of the many terms, and its plain sum over positions is 10 times slower."""
    kernel, x, document = saved
    x_bar = _convolve(kernel, y_bar[:, ::-1], document[:, ::-1, ::-1])[:, ::-1]
    chunk, embed = kernel.shape

    def add_sequence(kernel_bar, now):
        x, y_bar, document = now
        x, y_bar = x.reshape(-1, chunk, embed), y_bar.reshape(-1, chunk, embed)
        by_chunk = []
        for lag in range(chunk):
            total = jnp.zeros_like(x[:, 0])
            for i in range(lag, chunk):
                same = document[:, i] == document[:, i - lag]
                total = total + jnp.where(same[:, None], y_bar[:, i] * x[:, i - lag], 0.0)
            by_chunk.append(total)
        summed = jnp.ones((1, len(x)), x.dtype) @ jnp.stack(by_chunk, axis=1).reshape(len(x), -1)
        return kernel_bar + summed.reshape(kernel.shape), None

    kernel_bar, _ = lax.scan(add_sequence, jnp.zeros_like(kernel), (x, y_bar, document))
    return kernel_bar, x_bar, None


_convolve.defvjp(_convolve_forward, _convolve_backward)
