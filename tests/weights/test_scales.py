"""The table of initial scales, checked against samples."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from support.models import VOCAB, heavy

from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.time import grid
from qkvflow.weights import GeneratedConfig, at
from qkvflow.weights.scales import TIME_SHARE

Embed = Axis("embed", 64)
BLOCK = Gpt2BlockConfig(num_heads=4)
S, T = 32, 64


def block(init, seed=0):
    config = GeneratedConfig(time_embed_dim=T, sinusoidal_dim=S, init=init)
    return config.build(lambda *, key: BLOCK.init(Embed, key=key), (), key=jax.random.PRNGKey(seed))


def std(x):
    return float(jnp.std(x.array))


@pytest.mark.parametrize("init", ["matched", heavy("official")])
def test_table(init):
    unit = block(init).mlp.c_fc
    official = init == "official"
    ordinary = 1 / np.sqrt(Embed.size)  # Haliax scales by fan-in; its truncation at 3 sigma takes about 1.3 %
    expect = {
        "lin1": (std(unit.net.lin1.weight), 0.02 if official else np.sqrt(2 / (2 * S + 1))),
        "lin2": (std(unit.net.lin2.weight), 0.02 if official else np.sqrt(1 / T)),
        "base": (std(unit.leaves.weight.base), 0.0 if official else ordinary * np.sqrt(1 - TIME_SHARE)),
        "bias": (std(unit.leaves.bias.projection), 1e-4 if official else 0.0),
    }
    if official:
        expect["projection"] = (std(unit.leaves.weight.projection), 0.02)
    for name, (got, want) in expect.items():
        # 4160 samples or more: the sample deviation is within 4 % of the true one but for one draw in 10^3.
        assert got == pytest.approx(want, rel=0.05, abs=1e-12), name
    assert std(unit.net.lin1.bias) == 0.0
    assert std(unit.net.lin2.bias) == 0.0
    assert std(block(init).attn_ln.leaves.weight.projection) == 0.0
    assert std(block(init).attn_ln.leaves.bias.projection) == 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_matched_weights_have_the_ordinary_scale_at_every_time(seed):
    times = np.linspace(0, 1, 41)
    ordinary = BLOCK.init(Embed, key=jax.random.PRNGKey(9))
    generated = at(block("matched", seed), grid(times))
    for find in (
        lambda b: b.attn.c_attn,
        lambda b: b.attn.c_proj,
        lambda b: b.mlp.c_fc,
        lambda b: b.mlp.c_proj,
    ):
        scale = jnp.std(find(generated).weight.array.reshape(len(times), -1), axis=1) / std(find(ordinary).weight)
        # Only the time-dependent tenth of the variance feels the fluctuation of |e(t)|^2, which is up to twofold.
        assert float(scale.min()) > 0.9
        assert float(scale.max()) < 1.1


def test_matched_weights_do_vary_with_time():
    generated = at(block("matched"), grid([0.1, 0.9])).mlp.c_fc.weight.array
    change = jnp.std(generated[0] - generated[1]) / jnp.std(generated[0])
    assert float(change) > 0.2


def test_norms_start_as_ordinary_norms():
    norm = at(block("matched"), 0.4).attn_ln
    np.testing.assert_array_equal(norm.weight.array, np.ones(Embed.size))
    np.testing.assert_array_equal(norm.bias.array, np.zeros(Embed.size))


def test_embeddings():
    model = NeuralOdeConfig(max_seq_len=256, hidden_dim=64, block=BLOCK).build(VOCAB, key=jax.random.PRNGKey(0))
    assert std(model.embeddings.token_embeddings.weight) == pytest.approx(0.02, rel=0.05)
    assert std(model.embeddings.position_embeddings.weight) == pytest.approx(0.01, rel=0.05)
    assert isinstance(model.embeddings.token_embeddings.weight, hax.NamedArray)
