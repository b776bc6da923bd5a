"""Both ends of the model: x(0) = m (token + position), with learned positions where the block wants them; the head.

m, `embedding_multiplier`, is 1 in GPT-2. Blocks normalise what they read, so how fast the field turns a state depends
on the length of the state. With m = 1, x(0) has components of 0.02, the first step is many times as long, and no solver
with as few steps as in training follows the solution there.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split

from qkvflow.axes import POSITION
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.weights.scales import POSITION_EMBEDDING, TOKEN_EMBEDDING


class Embeddings(eqx.Module):
    """token_embeddings {vocab, embed}, position_embeddings {position, embed} or None, their sum times the multiplier,
    then dropout."""

    token_embeddings: hnn.Embedding
    position_embeddings: hnn.Embedding | None
    dropout: hnn.Dropout
    multiplier: float = eqx.field(static=True, default=1.0)

    @staticmethod
    def init(Vocab: Axis, config: NeuralOdeConfig, *, key) -> "Embeddings":
        k_token, k_position = jax.random.split(key)
        std = TOKEN_EMBEDDING if config.block.tie_word_embeddings else config.weights.scales.untied_embedding
        tokens = _embedding(Vocab, config.Embed, std, key=k_token)
        positions = None
        if config.block.learned_positions:
            positions = _embedding(config.max_Pos, config.Embed, POSITION_EMBEDDING, key=k_position)
        return Embeddings(tokens, positions, hnn.Dropout(config.block.embed_pdrop), config.embedding_multiplier)

    def __call__(self, tokens: NamedArray, *, pos_ids: NamedArray | None = None, key=None) -> NamedArray:
        """{..., position} -> {..., position, embed}. `pos_ids` defaults to 0, 1, 2, ..."""
        (k_drop,) = maybe_rng_split(key, 1)
        x = self.token_embeddings(tokens)
        if self.position_embeddings is not None:
            if pos_ids is None:
                pos_ids = hax.arange(tokens.resolve_axis(POSITION), dtype=jnp.int32)
            x = x + self.position_embeddings.embed(pos_ids)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.dropout(x, key=k_drop)


def init_head(Vocab: Axis, config: NeuralOdeConfig, *, key) -> hnn.Linear | None:
    """The head {embed, vocab}, or None if the token embeddings serve as it."""
    if config.block.tie_word_embeddings:
        return None
    head = hnn.Linear.init(config.Embed, Vocab, key=key, use_bias=False, out_first=False)
    std = config.weights.scales.head
    if std is None:
        return head
    return dataclasses.replace(head, weight=hax.random.normal(key, head.weight.axes) * std)


def _embedding(Index: Axis, Embed: Axis, std: float, *, key) -> hnn.Embedding:
    return hnn.Embedding(hax.random.normal(key, (Index, Embed)) * std, Index, Embed)
