"""State-space recurrences in chunks of positions: only the states between chunks are kept for the backward pass.

Memory is {batch, position / chunk, state, embed} instead of {batch, position, state, embed}; time is linear in the
length. Within a chunk there are two ways, with the same numbers:

    associative: h_k = keep_k h_{k-1} + new_k for all k at once, by pairs of pairs. For devices with many cores.
    loop: one position after the other, over all of {batch, state, embed} at once. On a CPU, where that is as much as
        its cores can do, it does less work and stays in the cache: 3 to 5 times faster.

Shapes and symbols as in `qkvflow.blocks.recurrence`; here arrays of a chunk have the axes {chunk, batch, ...}.
"""

import jax
import jax.numpy as jnp
from jax import lax

from qkvflow.blocks.recurrence import hold
from qkvflow.blocks.selective import selective_loop

CHUNK = {"loop": 16, "associative": 64}


def chunked(delta, A, B, C, x, start, method: str | None = None):
    """y [batch, position, embed] of the recurrence, time-invariant or selective.

    Args:
        method: `loop` or `associative`; by default what suits the device.
    """
    if method is None:
        method = "loop" if jax.default_backend() == "cpu" else "associative"
    selective, length = delta.ndim == 3, x.shape[1]
    moving = (x, 1 - start.astype(x.dtype), *((delta, B, C) if selective else ()))
    chunks = tuple(_split(array, min(CHUNK[method], length)) for array in moving)
    state, A = jnp.zeros((x.shape[0], *A.shape), x.dtype), A[None]
    if selective and method == "loop":
        y = selective_loop(state, A, *chunks)
    else:
        constant = None if selective else tuple(map(_whole, (*_hold(delta[None, None], A, B[None]), C[None])))
        run = _loop if method == "loop" else _associative
        run_chunk = jax.checkpoint(lambda state, now: run(state, now, A, constant))
        _, y = lax.scan(run_chunk, state, chunks)
    return jnp.moveaxis(y.reshape(-1, *y.shape[2:]), 0, 1)[:, :length]


def _loop(state, now, A, constant):
    """One chunk, position by position, of a time-invariant system: (state after it, y)."""
    keep, take, C = constant

    @jax.checkpoint
    def step(h, now):
        x, link = now
        h = keep * (link[:, None, None] * h) + take * x[:, None, :]
        return h, jnp.sum(C * h, axis=1)

    return lax.scan(step, state, now)


def _associative(state, now, A, constant):
    """One chunk, all positions at once: (state after it, y)."""
    x, link, *system = now
    if constant is None:
        delta, B, C = system[0][:, :, None, :], system[1][..., None], system[2][..., None]
        keep, take = _hold(delta, A[None], B)
    else:
        keep, take, C = (array[None] for array in constant)
    link = link[..., None, None]
    new = take * x[:, :, None, :]
    keep = jnp.broadcast_to(keep * link, new.shape)
    new = new.at[0].add(keep[0] * state)
    states = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, new))[1]
    return states[-1], jnp.sum(C * states, axis=2)


def _hold(delta, A, B):
    """The factors of h_{k-1} and of x_k."""
    keep, phi = hold(delta * A)
    return keep, delta * phi * B


def _whole(array):
    """What each iteration of a loop reads, replicated on every device of a mesh: shards would be gathered in each
    iteration."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return lax.with_sharding_constraint(array, jax.sharding.PartitionSpec())


def _split(array, chunk: int):
    """[batch, position, ...] -> {chunks, chunk, batch, ...}. Padding is at the end, and changes nothing before it."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % chunk), *((0, 0),) * (array.ndim - 2)))
    return jnp.moveaxis(padded, 1, 0).reshape(-1, chunk, array.shape[0], *array.shape[2:])
