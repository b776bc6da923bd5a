"""The models that are timed, their data, and their losses."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmExample

from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig

HEADS = 4
Vocab = hax.Axis("vocab", 257)
GENERATED = GeneratedConfig(time_embed_dim=64, sinusoidal_dim=32)
SMALL = GeneratedConfig(time_embed_dim=16, sinusoidal_dim=32)


def flow(width: int, sequence: int, weights=GENERATED, block=None, **depth) -> NeuralOdeConfig:
    """depth: keys of `DepthConfig`."""
    block, depth = block or Gpt2BlockConfig(num_heads=HEADS), DepthConfig(**{"solver": "euler", **depth})
    return NeuralOdeConfig(max_seq_len=sequence, hidden_dim=width, block=block, weights=weights, depth=depth)


def build(config: LmConfig, vocab: hax.Axis = Vocab):
    return config.build(vocab, key=jax.random.PRNGKey(0))


def example(sequence: int, batch: int) -> LmExample:
    Batch, Pos = hax.Axis("batch", batch), hax.Axis("position", sequence)
    tokens = hax.random.randint(jax.random.PRNGKey(0), (Batch, Pos), 0, Vocab.size)
    weight = LmExample.causal_loss_mask(Pos).astype(jnp.float32).broadcast_axis(Batch)
    return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())


def loss(config: LmConfig, batch: int) -> tuple[Callable[[Any], tuple[jax.Array, Any]], Any]:
    """Loss and gradients of the parameters, at the model's full length; and the parameters at first."""
    params, static = eqx.partition(build(config), eqx.is_inexact_array)
    data = example(config.max_seq_len, batch)
    return jax.value_and_grad(lambda p: eqx.combine(p, static).compute_next_token_loss(data).scalar()), params


def gradient(config: LmConfig, batch: int) -> Callable[[], object]:
    """A call that computes loss and gradients once."""
    compute, params = loss(config, batch)
    compiled = jax.jit(compute)
    return lambda: compiled(params)
