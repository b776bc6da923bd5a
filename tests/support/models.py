"""Small models of every kind, and tokens for them."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qkvflow  # noqa: F401
from qkvflow.blocks import Gpt2BlockConfig, LlamaBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import BasisConfig, ConstantConfig, GeneratedConfig, ModulatedConfig, PerLayerConfig

VOCAB = hax.Axis("vocab", 64)
WEIGHTS = {
    "generated": GeneratedConfig(time_embed_dim=6, sinusoidal_dim=4),
    "constant": ConstantConfig(),
    "per_layer": PerLayerConfig(),
    "modulated": ModulatedConfig(hidden_dim=8, sinusoidal_dim=4),
    "basis": BasisConfig(basis="cosine", dim=3),
}


def small_config(weights="generated", form="parallel", depth=None, **kwargs) -> NeuralOdeConfig:
    """By default width 16, 2 heads, sequence 12, 3 Euler steps."""
    block = kwargs.pop("block", Gpt2BlockConfig(num_heads=2, form=form, mlp_scale=2))
    depth = depth or DepthConfig(steps=3)
    return NeuralOdeConfig(
        max_seq_len=12,
        hidden_dim=16,
        block=block,
        weights=WEIGHTS.get(weights, weights),
        depth=depth,
        **kwargs,
    )


def llama(form="parallel", **kwargs) -> LlamaBlockConfig:
    """Two query heads that share one key-value head."""
    return LlamaBlockConfig(**{"num_heads": 2, "num_kv_heads": 1, "intermediate_dim": 24, "form": form} | kwargs)


@functools.cache  # models are immutable, and initialising one takes longer than most tests
def build(config, seed=0):
    """A model with noise on every parameter, so that zero initialisation hides nothing."""
    model = config.build(VOCAB, key=jax.random.PRNGKey(seed))
    noise = np.random.default_rng(seed + 1)

    def noisy(x):
        return jnp.asarray(np.asarray(x) + 0.05 * noise.standard_normal(x.shape), x.dtype) if is_float(x) else x

    return jax.tree.map(noisy, model)


def is_float(x) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def heavy(*values):
    """A case that only `make test-slow` runs, because the fast tests include a lighter case of the same law."""
    return pytest.param(*values, marks=pytest.mark.slow)


def random_tokens(seed=7, batch=2, length=12):
    axes = (hax.Axis("batch", batch), hax.Axis("position", length))
    return hax.random.randint(jax.random.PRNGKey(seed), axes, 0, VOCAB.size)


def change(tokens, j):
    """The tokens with a different one at position j."""
    return hax.named(tokens.array.at[:, j].set((tokens.array[:, j] + 1) % VOCAB.size), tokens.axes)
