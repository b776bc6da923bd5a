"""Rejection sampling of drafted tokens: which are accepted, and which token follows them.

    a draft x ~ q is accepted with probability min(1, p(x) / q(x));  the first rejected draft is replaced by a sample
    from the residual, max(p - q, 0) / sum max(p - q, 0);  if all are accepted, a sample from p follows them

The resulting tokens have the distribution p, whatever q is. p and q are the sampling distributions: after bias,
temperature, top-k and top-p. Greedy decoding has all mass on one token: a draft is accepted if it is the most likely.
Sources: Leviathan et al. (arXiv 2211.17192), algorithm 1; Chen et al. (arXiv 2302.01318), theorem 1.

All draws at a position depend only on its seed and the position. The noise of a rejected draft is reused by the next
draft at that position; no accepted token depended on it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qkvflow.generation.sampling import Sampling, choose, draw, log_probabilities, noise_key

_DRAFT, _VERDICT = 1, 2  # noise streams at a position, in addition to that of the token itself


def propose(
    logits: Float[Array, "batch vocab"], sampling: Sampling, position: Int[Array, "batch"], active: Bool[Array, "batch"]
) -> tuple[Int[Array, "batch"], Float[Array, "batch vocab"]]:
    """A draft at `position`, and log q up to a constant; zeros if no sequence is sampled."""
    log_q = jax.lax.cond(
        _any_drawn(sampling, active),
        lambda: log_probabilities(logits, sampling, active),
        lambda: jnp.zeros(logits.shape, jnp.float32),
    )
    return choose(logits, sampling, position, active, stream=_DRAFT), log_q


def judge(
    logits: Float[Array, "batch window vocab"],
    drafts: Int[Array, "batch drafts"],
    log_q: Float[Array, "batch drafts vocab"],
    count: Int[Array, "batch"],
    sampling: Sampling,
    position: Int[Array, "batch"],
    active: Bool[Array, "batch"],
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """The number of accepted drafts among the first `count`, and the token that follows them.

    Args:
        logits: including bias, at the places of the drafts (the first at `position`) and after the last one.
    """
    proposed = jnp.arange(drafts.shape[1])[None] < count[:, None]
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy = _leading(proposed & (drafts == likeliest[:, :-1]))
    greedy = greedy, _at(likeliest, greedy)

    def drawn():
        log_p = jax.vmap(log_probabilities, (1, None, None), 1)(logits, sampling, active)
        p, q = jax.nn.softmax(log_p), jax.nn.softmax(log_q)
        u = jax.vmap(_uniform, (None, 0))(sampling.seed, position[None] + jnp.arange(drafts.shape[1])[:, None]).T
        p_of, q_of = (jnp.take_along_axis(d, drafts[..., None], axis=-1)[..., 0] for d in (p[:, :-1], q))
        stay = _leading(proposed & (u * q_of < p_of))
        # The replacement of a draft leaves out the excess of q.
        rest = jnp.maximum(_at(p, stay) - _at(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), stay), 0.0)
        is_rest = (stay < count) & (rest.sum(axis=-1) > 0)  # if p and q are equal up to rounding, there is no residual
        log_of = jnp.where(is_rest[:, None], jnp.log(rest), _at(log_p, stay))
        behind = jax.vmap(draw)(log_of, sampling.seed, position + stay)
        return tuple(jnp.where(sampling.temperature > 0, *pair) for pair in zip((stay, behind), greedy, strict=True))

    return jax.lax.cond(_any_drawn(sampling, active), drawn, lambda: greedy)


def _any_drawn(sampling: Sampling, active):
    return jnp.any(active & (sampling.temperature > 0))


def _leading(stay: Bool[Array, "batch drafts"]) -> Int[Array, "batch"]:
    return jnp.cumprod(stay, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def _at(array, index):
    """[batch, window, ...] -> [batch, ...]."""
    return jnp.take_along_axis(array, index.reshape(-1, *[1] * (array.ndim - 1)), axis=1)[:, 0]


def _uniform(seeds, positions):
    return jax.vmap(lambda seed, at: jax.random.uniform(noise_key(seed, at, _VERDICT), dtype=jnp.float32))(
        seeds, positions
    )
