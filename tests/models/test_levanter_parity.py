"""`per_layer` weights, sequential form and step 1 are Levanter's own GPT-2: logits, and the losses of a training."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample

from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.models.levanter_twin import enter_config
from qkvflow.weights import PerLayerConfig

Vocab = hax.Axis("vocab", 50)
Batch, Pos = hax.Axis("batch", 4), hax.Axis("position", 16)


@pytest.fixture(scope="module")
def pair():
    """Levanter's GPT-2 and ours, with the same arrays."""
    theirs = Gpt2Config(max_seq_len=16, hidden_dim=24, num_layers=3, num_heads=3).build(
        Vocab, key=jax.random.PRNGKey(0)
    )
    config = NeuralOdeConfig(
        max_seq_len=16,
        hidden_dim=24,
        block=Gpt2BlockConfig(num_heads=3, form="sequential"),
        weights=PerLayerConfig(),
        depth=DepthConfig(steps=3, step_size="residual"),
    )
    ours = config.build(Vocab, key=jax.random.PRNGKey(1))

    def parts(model, is_ours):
        block = model.transformer.blocks.stacked
        norms = (block.attn_ln, block.mlp_ln) if is_ours else (block.ln_1, block.ln_2)
        final = model.transformer.norm if is_ours else model.transformer.ln_f
        linear = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        embeddings = (model.embeddings.token_embeddings, model.embeddings.position_embeddings)
        return [a for m in (*norms, final, *linear) for a in (m.weight, m.bias)] + [m.weight for m in embeddings]

    # The axis `layers` comes first on both sides; linear weights are [In, Out] on both sides.
    aligned = [b.rearrange(a.axes) for a, b in zip(parts(ours, True), parts(theirs, False), strict=True)]
    return theirs, eqx.tree_at(lambda m: parts(m, True), ours, aligned)


def example(step):
    tokens = hax.random.randint(jax.random.PRNGKey(100 + step), (Batch, Pos), 0, Vocab.size)
    weight = LmExample.causal_loss_mask(Pos).astype(jnp.float32).broadcast_axis(Batch)
    return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())


def test_same_number_of_parameters(pair):
    count = [sum(a.size for a in jax.tree.leaves(eqx.filter(m, eqx.is_array))) for m in pair]
    assert count[0] == count[1]


def test_logits(pair):
    tokens = example(0).tokens
    theirs, ours = (eqx.filter_jit(lambda m: m(tokens, AttentionMask.causal()).array)(m) for m in pair)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_twenty_training_steps(pair):
    def curve(model):
        optimizer = optax.adamw(3e-3)
        params, static = eqx.partition(model, eqx.is_inexact_array)

        @jax.jit
        def step(params, state, example):
            def loss(p):
                return eqx.combine(p, static).compute_next_token_loss(example).scalar()

            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        state, losses = optimizer.init(params), []
        for i in range(20):
            params, state, value = step(params, state, example(i % 3))
            losses.append(float(value))
        return losses

    theirs, ours = (curve(m) for m in pair)
    assert theirs[-1] < theirs[0] - 0.2, "the training must do something"
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 1e-4
    assert jnp.isfinite(jnp.asarray(ours)).all()


def test_dropout_comes_along():
    """For a lifted model, which is trained on; Levanter does not apply `attn_pdrop`."""
    config = Gpt2Config(num_layers=2, hidden_dim=16, num_heads=2, resid_pdrop=0.1, embed_pdrop=0.2, attn_pdrop=0.3)
    block = enter_config(config).block
    assert (block.resid_pdrop, block.embed_pdrop, block.attn_pdrop) == (0.1, 0.2, 0.0)
