"""Laws of the trajectory views: the lens ends in the model itself, motion adds up, entropy is that of the attention."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from support.models import build, llama, random_tokens, small_config

from qkvflow.analysis import figures, trajectory
from qkvflow.analysis.reading import read
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig

MODELS = {
    "flow": small_config(depth=DepthConfig(steps=2), prelude_layers=1, coda_layers=1),
    "grouped, rk4": small_config("constant", block=llama(num_heads=4), depth=DepthConfig(solver="rk4", steps=2)),
    "controlled": small_config("constant", control=ControlConfig(dim=2, alpha=1.0), depth=DepthConfig(steps=2)),
    "Levanter gpt2": Gpt2Config(max_seq_len=12, hidden_dim=16, num_heads=2, num_layers=2, mlp_scale=2),
    "Levanter llama": LlamaConfig(
        max_seq_len=12, hidden_dim=16, intermediate_dim=24, num_heads=4, num_kv_heads=2, num_layers=2
    ),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "flow"]


@pytest.mark.parametrize("name", ["flow", *SLOW])
def test_the_end_is_the_model_and_the_entropy_that_of_its_attention(name):
    model = build(MODELS[name])
    tokens = random_tokens(batch=1, length=5)["batch", 0]
    lens = trajectory.logit_lens(model, tokens, top=3)
    logits = eqx.filter_jit(lambda m: m(tokens, AttentionMask.causal()).array)(model)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    loss = -log_p[np.arange(4), np.asarray(tokens.array)[1:]]
    np.testing.assert_allclose(lens.loss[-1], loss, atol=1e-4)
    np.testing.assert_array_equal(lens.top_tokens[-1], np.argsort(-log_p, axis=-1)[:, :3])
    assert (np.diff(lens.top_probabilities, axis=-1) <= 0).all()

    entropy = trajectory.attention_entropy(model, tokens)
    assert entropy.shape[0] == 2
    most = np.log(np.arange(1, 6))
    assert (entropy[..., 0] == 0).all()
    assert (entropy > -1e-6).all()
    assert (entropy < most + 1e-5).all()
    # Without queries all tokens are attended to equally, and the entropy is the largest possible.
    is_query = lambda path: any(getattr(k, "name", "") in ("q_proj", "c_attn") for k in path)  # noqa: E731
    blind = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.zeros_like(a) if is_query(path) and eqx.is_inexact_array(a) else a, model
    )
    np.testing.assert_allclose(
        trajectory.attention_entropy(blind, tokens), np.broadcast_to(most, entropy.shape), atol=1e-5
    )
    for figure in (figures.lens(lens, list("abcde")), figures.entropy(read(model).times, entropy)):
        assert figure.get_axes()


def test_entropy_by_hand():
    """Of a first step of GPT-2's attention, written out."""
    model = build(small_config("per_layer"))
    tokens = random_tokens(batch=1, length=4)["batch", 0]
    block = model.transformer.flow.blocks.stacked
    x = model.embeddings(tokens)
    first = jax.tree.map(lambda a: a["layers", 0] if _named(a) else a, block, is_leaf=_named)
    q, k, _ = eqx.filter_jit(lambda b, x: b.attn.c_attn(b.attn_ln(x)))(first, x).unbind("qkv")
    scores = hax.dot(q, k.rename({"position": "key"}), axis="head_size").rearrange(("heads", "position", "key")).array
    entropy = trajectory.attention_entropy(model, tokens)
    for i in range(4):
        p = np.asarray(jax.nn.softmax(scores[:, i, : i + 1] / np.sqrt(8)), np.float64)
        expected = -(p * np.log(p)).sum(-1)
        np.testing.assert_allclose(entropy[0, :, i], expected, atol=1e-5)


def _named(x):
    return isinstance(x, hax.NamedArray)


def test_motion_adds_up():
    """The speeds times the step make the path; the start, the end and every state are those of the model."""
    model = build(small_config())
    tokens = random_tokens(batch=1, length=5)["batch", 0]
    x = trajectory.states(model, tokens)
    np.testing.assert_allclose(x[1:], eqx.filter_jit(lambda m: m.trajectory(tokens).array)(model), atol=1e-6)
    motion = trajectory.motion(model, tokens)
    v = np.diff(x.astype(np.float64), axis=0) * 3
    np.testing.assert_allclose(motion.speed, np.linalg.norm(v, axis=-1))
    cosine = (v[:-1] * v[1:]).sum(-1) / np.linalg.norm(v[:-1], axis=-1) / np.linalg.norm(v[1:], axis=-1)
    np.testing.assert_allclose(motion.turning, cosine)
    moved = np.linalg.norm(x[-1] - x[0], axis=-1) / np.linalg.norm(x[0], axis=-1)
    np.testing.assert_allclose(motion.displacement[-1], moved, rtol=1e-6)
    assert (motion.displacement[0] == 0).all()
    assert (moved * np.linalg.norm(x[0], axis=-1) <= motion.speed.sum(0) / 3 + 1e-6).all()  # no path is shorter
    with pytest.raises(UserError, match=r"top must lie in 1\.\.64"):
        trajectory.logit_lens(model, tokens, top=65)
    one_step = trajectory.motion(build(small_config(depth=DepthConfig(steps=1))), tokens)
    assert len(one_step.turning) == 0
    for drawn in (motion, one_step):
        assert len(figures.motion(drawn).get_axes()) == 3
