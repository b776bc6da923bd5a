"""`per_layer` weights, sequential form and step 1 are Levanter's own Llama, grouped queries included."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from support.models import heavy

from qkvflow.axes import HEADS, KV_HEAD, LAYERS, Q_HEADS_PER_GROUP
from qkvflow.blocks import LlamaBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import PerLayerConfig

Vocab = hax.Axis("vocab", 50)
Batch, Pos = hax.Axis("batch", 4), hax.Axis("position", 16)
ROPE = {"rope": Llama3RotaryEmbeddingsConfig(theta=500.0, original_max_position_embeddings=8)}
CASES = {
    "all heads": (4, {}),
    "grouped": (2, {}),
    "one key-value head": (1, {"use_bias": True, "tie_word_embeddings": True}),
    "llama3 positions": (2, ROPE),
}


def noisy(model):
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.PRNGKey(5), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return jax.tree.unflatten(structure, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in pairs])


def arrays(model, is_ours):
    block = model.transformer.blocks.stacked if is_ours else model.transformer.layers.stacked
    modules = [getattr(block.self_attn, f"{n}_proj") for n in "qkvo"]
    modules += [block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj]
    modules += [block.input_layernorm, block.post_attention_layernorm, model.transformer.norm]
    modules += [model.embeddings.token_embeddings] + ([model.lm_head] if model.lm_head is not None else [])
    return [a for m in modules for a in (m.weight, getattr(m, "bias", None)) if a is not None]


def translate(theirs, ours):
    """Levanter's array with our names and our order of axes: its q_proj divides the heads into groups."""
    names = {a.name for a in theirs.axes}
    if Q_HEADS_PER_GROUP in names:
        theirs = theirs.flatten_axes((KV_HEAD, Q_HEADS_PER_GROUP), HEADS)
    if "layer" in names:
        theirs = theirs.rename({"layer": LAYERS})
    return theirs.rearrange(ours.axes)


@pytest.fixture(scope="module", params=["grouped", *(heavy(case) for case in CASES if case != "grouped")])
def pair(request):
    kv_heads, options = CASES[request.param]
    theirs = LlamaConfig(
        max_seq_len=16,
        hidden_dim=32,
        intermediate_dim=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=kv_heads,
        **options,
    ).build(Vocab, key=jax.random.PRNGKey(0))
    theirs = noisy(theirs)
    block = LlamaBlockConfig(num_heads=4, num_kv_heads=kv_heads, intermediate_dim=40, form="sequential", **options)
    ours = NeuralOdeConfig(
        max_seq_len=16,
        hidden_dim=32,
        block=block,
        weights=PerLayerConfig(),
        depth=DepthConfig(steps=3, step_size="residual"),
    ).build(Vocab, key=jax.random.PRNGKey(1))
    mine, given = arrays(ours, True), arrays(theirs, False)
    aligned = [translate(a, b) for a, b in zip(given, mine, strict=True)]
    return theirs, eqx.tree_at(lambda m: arrays(m, True), ours, aligned)


def example(seed):
    tokens = hax.random.randint(jax.random.PRNGKey(seed), (Batch, Pos), 0, Vocab.size)
    weight = LmExample.causal_loss_mask(Pos).astype(jnp.float32).broadcast_axis(Batch)
    return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())


def test_same_number_of_parameters(pair):
    count = [sum(a.size for a in jax.tree.leaves(eqx.filter(m, eqx.is_array))) for m in pair]
    assert count[0] == count[1]


def test_logits_and_loss(pair):
    theirs, ours = (
        eqx.filter_jit(
            lambda m: (
                m(example(0).tokens, AttentionMask.causal()).array,
                m.compute_next_token_loss(example(0)).scalar(),
            )
        )(m)
        for m in pair
    )
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_gradients(pair):
    """The gradient of each array, translated as the array itself."""
    grads = [eqx.filter_jit(eqx.filter_grad(lambda m: m.compute_next_token_loss(example(1)).scalar()))(m) for m in pair]
    for theirs, ours in zip(arrays(grads[0], False), arrays(grads[1], True), strict=True):
        # fp32 sums in another order; the largest entry sets the scale
        error = jnp.abs(translate(theirs, ours).array - ours.array).max()
        assert float(error) <= 2e-5 * float(jnp.abs(ours.array).max())


def test_given_positions(pair):
    tokens = example(2).tokens
    pos_ids = hax.arange(Pos) * 2 + 3
    theirs, ours = (eqx.filter_jit(lambda m: m(tokens, AttentionMask.causal(), pos_ids=pos_ids).array)(m) for m in pair)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    plain = pair[1](tokens, AttentionMask.causal()).array
    assert not np.allclose(ours, plain, atol=1e-3), "positions further apart give other logits"
