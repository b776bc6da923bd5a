"""Log-probabilities of tokens under the model itself: before bias, temperature, top-k and top-p."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST = 20  # most likely tokens reported in addition to the token itself
_BLOCK = 16  # positions whose logits exist at once when a prompt is scored


class Logprobs(NamedTuple):
    """log p of a token, and the most likely tokens with theirs, in descending order. Equal logits give equal values."""

    token: Float[Array, "..."]
    top: Int[Array, "... most"]
    top_logprobs: Float[Array, "... most"]

    @staticmethod
    def of(logits: Float[Array, "... vocab"], token: Int[Array, "..."]) -> "Logprobs":
        logits = logits.astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        values, top = jax.lax.top_k(logits, min(MOST, logits.shape[-1]))
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)
        return Logprobs((chosen - total)[..., 0], top.astype(jnp.int32), values - total)

    @staticmethod
    def none(*shape: int) -> "Logprobs":
        """A placeholder where no log-probabilities were requested. shape: of the logits."""
        *places, vocab_size = shape
        likeliest = (*places, min(MOST, vocab_size))
        of = jnp.zeros(places, jnp.float32), jnp.zeros(likeliest, jnp.int32), jnp.zeros(likeliest, jnp.float32)
        return Logprobs(*of)


def in_blocks(logits_of, x: Float[Array, "position embed"], tokens: Int[Array, "position"]) -> Logprobs:
    """For a token at each position.

    Args:
        logits_of: x [block, embed] -> [block, vocab], for a few positions at a time.
    """
    blocks = (x.reshape(-1, _BLOCK, x.shape[-1]), tokens.reshape(-1, _BLOCK))
    found = jax.lax.map(lambda block: Logprobs.of(logits_of(block[0]), block[1]), blocks)
    return jax.tree.map(lambda a: a.reshape(len(x), *a.shape[2:]), found)
