"""Each measure against a direct computation; and what is known of self-attention as a dynamical system."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from support.models import VOCAB, build, heavy, random_tokens, small_config
from support.tiny import FLOW, tiny

from qkvflow import lens
from qkvflow.analysis import lyapunov, spectral, trajectory
from qkvflow.blocks import Gpt2BlockConfig, Inputs
from qkvflow.config import decode
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig, load_run
from qkvflow.train_lm import main as train

TOKENS = random_tokens()
PATH = ("layers", "position", "embed")


def path(x):
    return NamedArray(np.asarray(x, np.float64), PATH)


def test_geometry_of_a_circle_and_a_line():
    """Curvature is 1/R on any circle, 0 on a line; the speed integrates to the polygon; cosines are those of angles."""
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.standard_normal((5, 2)))[0]
    angles, R = np.sort(rng.uniform(0, 3, 7)), 2.5
    circle = R * np.stack([np.cos(angles), np.sin(angles)], -1) @ plane.T
    line = np.cumsum(rng.uniform(0.5, 1.0, (7, 1)), 0) * plane[:, 0] + rng.standard_normal(5)
    x = path(np.stack([circle, line], 1))
    curvature = lens.curvature(x)
    assert curvature.axis_names == ("layers", "position")
    np.testing.assert_allclose(curvature.array[:, 0], 1 / R)
    np.testing.assert_allclose(curvature.array[:, 1], 0, atol=1e-6)
    np.testing.assert_allclose(lens.turning(x).array[:, 1], 1)
    chords = 2 * R * np.sin(np.diff(angles) / 2)
    np.testing.assert_allclose(lens.speed(x).array[:, 0], chords * 6)
    np.testing.assert_allclose(
        lens.turning(x).array[:, 0], np.cos((np.diff(angles)[1:] + np.diff(angles)[:-1]) / 2), atol=1e-12
    )
    similarity = lens.cosine_similarity(x)
    assert similarity.axis_names == ("layers", "other_layers", "position")
    np.testing.assert_allclose(similarity.array[..., 0], np.cos(angles[:, None] - angles), atol=1e-12)


def test_rank_and_clusters():
    """Of k orthogonal directions of equal weight the rank is k; chains of close tokens are one cluster."""
    basis = np.eye(6)
    x = path([basis[[0, 1, 2, 0, 1, 2]], basis[[0, 0, 0, 0, 0, 0]] * np.arange(1, 7)[:, None], basis])
    np.testing.assert_allclose(lens.effective_rank(x).array, [3, 1, 6])
    found = lens.clustering(x)
    np.testing.assert_array_equal(found.clusters.array, [3, 1, 6])
    np.testing.assert_allclose(found.similarity.array, [3 / 15, 1, 0])
    angles = np.array([0.0, 0.3, 0.6, 0.9, 2.5, 2.7])
    chain = path([np.stack([np.cos(angles), np.sin(angles)], -1)])
    pairs = [np.cos(a - b) for i, a in enumerate(angles) for b in angles[:i]]
    np.testing.assert_allclose(lens.clustering(chain).similarity.array, [np.mean(pairs)])
    assert [int(lens.clustering(chain, c).clusters.array[0]) for c in (0.95, 0.97, 0.999, -1.0)] == [2, 5, 6, 1]
    batch = NamedArray(np.stack([x.array] * 2, 1), ("layers", "batch", "position", "embed"))
    assert lens.clustering(batch).clusters.axis_names == ("layers", "batch")
    with pytest.raises(UserError, match="at least two tokens"):
        lens.clustering(path(np.ones((3, 1, 4))))


def test_entropy_of_attention():
    p = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5))
    entropy = lens.attention_entropy(NamedArray(p, ("layers", "heads", "position", "key_position")))
    np.testing.assert_allclose(entropy.array, -(p * np.log(p)).sum(-1))
    alone = NamedArray(np.eye(4)[None], ("heads", "position", "key_position"))
    assert (lens.attention_entropy(alone).array == 0).all()


def test_logit_and_tuned_lens():
    """The end is the model; untrained translators are the logit lens; trained ones come closer to the end."""
    model = build(small_config(coda_layers=1))
    found = eqx.filter_jit(lens.logit_lens)(model, TOKENS, 3)
    logits, cache = eqx.filter_jit(lens.run_with_cache)(model, TOKENS, "state.*")
    last = np.asarray(jax.nn.log_softmax(logits.array))
    ids = np.asarray(TOKENS.array)
    rows, columns = np.arange(2)[:, None], np.arange(11)
    np.testing.assert_allclose(found.loss["layers", 3].array, -last[rows, columns, ids[:, 1:]], atol=1e-5)
    np.testing.assert_array_equal(found.top_tokens["layers", 3].array, np.argsort(-last, -1)[..., :3])
    np.testing.assert_allclose(found.kl["layers", 3].array, 0, atol=1e-6)

    @eqx.filter_jit
    def by_hand(model, x):
        t = model.transformer
        return jax.nn.log_softmax(hax.dot(t.norm(t.coda(x, Inputs.of())), model.get_lm_head(), axis="embed").array)

    early = np.asarray(by_hand(model, cache["state.0.3333"]))
    kl = (np.exp(last) * (last - early)).sum(-1)
    np.testing.assert_allclose(found.kl["layers", 1].array, kl, atol=1e-5)
    np.testing.assert_allclose(found.loss["layers", 1].array, -early[rows, columns, ids[:, 1:]], atol=1e-5)

    same = lens.tuned_lens(model, [TOKENS], epochs=0)
    at_first = eqx.filter_jit(lens.logit_lens)(model, TOKENS, 3, tuned=same)
    np.testing.assert_allclose(at_first.kl.array, found.kl.array, atol=1e-6)
    tuned = lens.tuned_lens(model, [TOKENS, random_tokens(seed=1)], epochs=20, learning_rate=1e-2)
    held_out = random_tokens(seed=2)
    read = [eqx.filter_jit(lens.logit_lens)(model, held_out, 3, tuned=t).kl.array.mean((1, 2)) for t in (None, tuned)]
    assert (read[1][:3] < read[0][:3]).all()
    assert read[1][3] == read[0][3]
    for call in (lambda: lens.logit_lens(model, TOKENS, 65), lambda: lens.tuned_lens(model, [])):
        with pytest.raises(UserError, match=r"1\.\.64|at least one batch"):
            call()
    for steps in (2, 6):
        with pytest.raises(UserError, match=f"states of 3 steps .* takes {steps} steps"):
            lens.logit_lens(model.with_depth(model.config.depth.on_grid(steps)), TOKENS, 3, tuned=tuned)


def test_the_lens_reads_a_pass_with_edits():
    """In the flow and after it: the end is that of the edited pass."""
    model = build(small_config("constant", coda_layers=1, depth=DepthConfig(steps=2)))
    read, edited_pass = eqx.filter_jit(lens.logit_lens), eqx.filter_jit(lens.run_with_edits)
    edits = {"1.mlp.out": lambda x: x * 0, "coda.0.mlp.out": lambda x: x * 2, "logits": lambda x: x * 3}
    found = read(model, TOKENS, 3, edits=edits)
    last = np.asarray(jax.nn.log_softmax(edited_pass(model, TOKENS, edits).array))
    rows, columns, ids = np.arange(2)[:, None], np.arange(11), np.asarray(TOKENS.array)
    np.testing.assert_allclose(found.loss["layers", 2].array, -last[rows, columns, ids[:, 1:]], atol=1e-5)
    eqx.filter_eval_shape(lens.logit_lens, model, TOKENS, 3, edits=None)


class Affine(eqx.Module):
    """dx/dt = x A + b, for each token by itself."""

    A: NamedArray
    b: NamedArray

    def __call__(self, x, inputs, *, key=None):
        return (hax.dot(x, self.A, axis="embed").rename({"out": "embed"}) + self.b).rearrange(x.axes)


def affine_model(A, b, **depth):
    model = build(small_config("constant", depth=DepthConfig(**depth)))
    field = Affine(hax.named(jnp.asarray(A, jnp.float32), ("embed", "out")), hax.named(jnp.asarray(b), "embed"))
    flow = dataclasses.replace(model.transformer.flow, weights=field)
    return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, flow=flow))


def test_an_affine_contraction_has_its_exponents():
    """dx/dt = x A + b, A symmetric with eigenvalues -2..-0.5: exponents are those, at every t, for each token."""
    rng = np.random.default_rng(0)
    Q, rates = np.linalg.qr(rng.standard_normal((16, 16)))[0], np.linspace(-2.0, -0.5, 16)
    model = affine_model(Q * rates @ Q.T, rng.standard_normal(16).astype(np.float32), solver="rk4", steps=8)
    tokens = TOKENS["batch", 0, "position", :3]
    map_ = lyapunov.token_map(model, tokens)
    assert map_.axis_names == ("layers", "position")
    np.testing.assert_allclose(map_.array, -0.5, atol=1e-4)
    np.testing.assert_allclose(lyapunov.spectrum(model, tokens, 48), np.sort(np.tile(rates, 3))[::-1], atol=1e-4)
    states = np.asarray(eqx.filter_jit(lens.states)(model, tokens).array, np.float64)
    fixed = -np.asarray(model.transformer.flow.weights.b.array, np.float64) @ np.linalg.inv(Q * rates @ Q.T)
    expected = (states[0] - fixed) @ scipy.linalg.expm(Q * rates @ Q.T) + fixed
    np.testing.assert_allclose(states[-1], expected, atol=1e-3)


def test_token_map_is_that_of_the_dense_jacobian():
    model, tokens = build(small_config()), TOKENS["batch", 0, "position", :3]
    x0 = hax.named(jnp.asarray(trajectory.states(model, tokens)[0]), ("position", "embed"))

    @jax.jit
    @jax.jacrev
    def ends(x):
        return model.transformer.flow.solve(hax.named(x, x0.axes), Inputs.of(), trajectory=True).states.array

    J = np.asarray(ends(x0.array), np.float64)  # [layers, position, embed, position, embed]
    found = lyapunov.token_map(model, tokens).array
    for n in range(3):
        for i in range(3):
            sigma = np.linalg.svd(J[n, :, :, i].reshape(-1, 16), compute_uv=False)[0]
            np.testing.assert_allclose(found[n, i], np.log(sigma) * 3 / (n + 1), atol=1e-4)


def attention_alone(V, steps, seed=0):
    """Flow of GPT-2's block with one head, any QK, W_V = V, W_O = I, and no MLP; tokens of all directions."""
    block = Gpt2BlockConfig(num_heads=1, mlp_scale=1)
    model = small_config("constant", block=block, depth=DepthConfig(steps=steps, step_size="residual")).build(
        VOCAB, key=jax.random.PRNGKey(seed)
    )
    weights, rng = model.transformer.flow.weights, np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.standard_normal((16, 16)) * 0.2, jnp.float32) for _ in "qk")
    c_attn = jnp.stack([q, k, jnp.asarray(V, jnp.float32)], 1)[:, :, None]  # [embed, qkv, heads, head_size]
    assert weights.attn.c_attn.weight.axis_names == ("embed", "qkv", "heads", "head_size")
    assert weights.attn.c_proj.weight.axis_names == ("heads", "head_size", "embed")
    zeros = lambda a: jnp.zeros_like(a.array)  # noqa: E731
    weights = eqx.tree_at(
        lambda b: (
            b.attn.c_attn.weight.array,
            b.attn.c_attn.bias.array,
            b.attn.c_proj.weight.array,
            b.attn.c_proj.bias.array,
            b.mlp.c_proj.weight.array,
            b.mlp.c_proj.bias.array,
        ),
        weights,
        (
            c_attn,
            zeros(weights.attn.c_attn.bias),
            jnp.eye(16)[None],
            zeros(weights.attn.c_proj.bias),
            zeros(weights.mlp.c_proj.weight),
            zeros(weights.mlp.c_proj.bias),
        ),
    )
    flow = dataclasses.replace(model.transformer.flow, weights=weights)
    embeddings = jax.tree.map(lambda a: a * 200, model.embeddings)
    return dataclasses.replace(
        model, embeddings=embeddings, transformer=dataclasses.replace(model.transformer, flow=flow)
    )


@pytest.mark.parametrize("seed", [0, heavy(1)])
def test_with_v_the_identity_causal_attention_gathers_all_tokens(seed):
    """One cluster, that of the first token, whatever QK is (Karagodin et al., arXiv 2411.04990, theorem 4.1); on the
    centred sphere on which LayerNorm puts the tokens, and where V = 0 nothing moves."""
    tokens = TOKENS["batch", 0, "position", :8]
    states = eqx.filter_jit(lens.states)(
        attention_alone(np.eye(16), 4000, seed), tokens, attn_mask=AttentionMask.causal()
    )
    centred = states - hax.mean(states, "embed")
    found = lens.clustering(NamedArray(centred.array[np.array([0, 40, 400, 4000])], PATH), 0.98)
    assert found.clusters.array[0] == 8
    assert found.clusters.array[-1] == 1
    assert (np.diff(found.similarity.array) > 0).all()
    end = np.asarray(centred.array[-1], np.float64)
    first = np.asarray(centred.array[0, 0], np.float64)
    assert (end @ first / np.linalg.norm(end, axis=-1) / np.linalg.norm(first) > 0.98).all()
    still = eqx.filter_jit(lens.states)(attention_alone(np.zeros((16, 16)), 2, seed), tokens)
    np.testing.assert_array_equal(still.array[-1], still.array[0])


def test_spectra_over_training_of_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"there is no run .*typo"):
        spectral.over_training(tmp_path / "typo", "ov")
    with pytest.raises(UserError, match=r"'vo' is not known\. Choices: qk, ov, ff"):
        spectral.over_training(tmp_path / "typo", "vo", steps=[2])


@pytest.mark.slow
def test_spectra_over_training(tmp_path):
    """Those of each checkpoint by itself."""
    kept = {"num_train_steps": 5, "checkpointer": {"keep": [{"every": 2}]}}
    raw = tiny(tmp_path, "r", FLOW | {"max_seq_len": 16}, **kept)
    run = train(decode(TrainConfig, raw))
    found = spectral.over_training(run, "ov")
    assert found.steps == (2, 4)
    assert found.eigenvalues.axis_names == ("checkpoints", "times", "heads", "eigenvalues")
    for k, step in enumerate(found.steps):
        own = spectral.ov_eigenvalues(load_run(run, step).model)
        np.testing.assert_array_equal(found.eigenvalues.array[k], own)
    assert not np.array_equal(found.eigenvalues.array[0], found.eigenvalues.array[-1])
    last = spectral.over_training(run, "qk", [0.25], steps=found.steps[-1:])
    np.testing.assert_array_equal(last.eigenvalues.array[0], spectral.qk_eigenvalues(load_run(run).model, [0.25]))
