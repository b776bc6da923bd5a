"""Laws of spectra: parity with dense eigenvalues and with the official arrays, other models, what is read off them."""

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.adaptor.lora import LoraConfig, loraize, merge_lora_modules
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from support.golden import golden
from support.models import build, llama, random_tokens, small_config

from qkvflow.analysis import spectral
from qkvflow.analysis.matrices import FAMILIES, products
from qkvflow.analysis.spectrum import Summary
from qkvflow.blocks import Inputs, SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig
from qkvflow.weights import at


def dense(model, family, times=None):
    """Eigenvalues of the full {embed, embed} products in the plain way."""
    left, right = (np.asarray(m, np.float64) for m in products(model, family, times))
    values = np.linalg.eigvals(left @ right)
    return np.take_along_axis(values, np.argsort(-np.abs(values), axis=-1), axis=-1)


@pytest.mark.parametrize("kind", ["train_time", "official_time"])
@pytest.mark.parametrize("name", ["gpt2", "gpt2_strong"])
def test_official_eigenvalues(name, kind):
    """The stored ones are of dense products of weights by the official code, at its times and at those of training.

    2e-5 of the largest of a matrix: the official time features carry the rounding of a float32 t (3e-5).
    """
    model, arrays = golden(name)
    times = spectral.official_times(6) if kind == "official_time" else None
    for family in FAMILIES:
        ours = spectral.eigenvalues(model, family, times)
        reference = arrays[f"{name}/{kind}/{family}"]
        assert ours.dtype == np.complex128
        assert np.abs(reference.imag).max() > 0.1 * np.abs(reference).max()  # they are no small thing to drop
        for part in (np.abs, lambda e: np.sort(e.real, axis=-1), lambda e: np.sort(e.imag, axis=-1)):
            error = np.abs(part(ours) - part(reference)).max(axis=-1) / np.abs(reference).max(axis=-1)
            assert error.max() < 5e-5, (family, error.max())


MODELS = {
    "flow": small_config(),
    "llama, grouped": small_config(block=llama()),
    "modulated": small_config("modulated", form="sequential", depth=DepthConfig(steps=3, step_size="residual")),
    "per layer": small_config("per_layer"),
    "rk4": small_config(depth=DepthConfig(solver="rk4", steps=2)),
    "controlled": small_config("constant", control=ControlConfig(dim=2)),
    "Levanter gpt2": Gpt2Config(max_seq_len=12, hidden_dim=16, num_heads=2, num_layers=3, mlp_scale=2),
    "Levanter llama": LlamaConfig(
        max_seq_len=12, hidden_dim=16, intermediate_dim=24, num_heads=4, num_kv_heads=2, num_layers=3
    ),
}


FAST = ("flow", "llama, grouped", "Levanter llama")


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in FAST)])
def test_equals_the_dense_eigenvalues(name):
    model = build(MODELS[name])
    times = len(spectral.training_times(model))
    for family in FAMILIES:
        ours = spectral.eigenvalues(model, family)
        full = dense(model, family)
        count = ours.shape[-1]
        assert len(ours) == times
        assert ours.shape[1:] == ((16,) if family == "ff" else (full.shape[1], 16 // full.shape[1]))
        scale = np.abs(full).max()
        np.testing.assert_allclose(np.abs(ours), np.abs(full[..., :count]), atol=1e-9 * scale)
        # All others are rounding noise: the rank of the product is at most head_size.
        assert np.abs(full[..., count:]).max(initial=0) < 1e-9 * scale
        # A multiset has the same power sums, whatever its order.
        for power in (1, 2, 3):
            np.testing.assert_allclose((ours**power).sum(-1), (full**power).sum(-1), atol=1e-9 * count * scale**power)


def test_qk_is_what_attention_compares():
    """x_i QK x_j^T is the product of query and key, of the right group."""
    model = build(small_config(block=llama(num_heads=4, num_kv_heads=2)))
    left, right = products(model, "qk")
    block = model.discretise().transformer.blocks.stacked
    x = hax.random.normal(jax.random.PRNGKey(1), (hax.Axis("position", 3), hax.Axis("embed", 16)))
    q, k = block.self_attn.q_proj(x), block.self_attn.k_proj(x)
    for head in range(4):
        ours = x.array @ (left @ right)[:, head] @ x.array.T
        theirs = hax.dot(q["heads", head], k["kv_head", head // 2].rename({"position": "key"}), axis="head_size")
        np.testing.assert_allclose(ours, theirs.rearrange(("layers", "position", "key")).array, rtol=2e-4, atol=1e-5)


def test_ov_is_what_a_head_writes():
    model = build(small_config())
    left, right = products(model, "ov")
    block = model.discretise().transformer.blocks.stacked
    x = hax.random.normal(jax.random.PRNGKey(1), (hax.Axis("embed", 16),))
    v = hax.dot(block.attn.c_attn.weight["qkv", 2], x, axis="embed")
    heads = hax.dot(v, block.attn.c_proj.weight, axis="head_size").rearrange(("layers", "heads", "embed"))
    np.testing.assert_allclose(x.array @ (left @ right), heads.array, rtol=2e-4, atol=1e-5)


def test_a_discretised_model_has_the_spectra_of_its_flow():
    model = build(small_config())
    for family in FAMILIES:
        np.testing.assert_array_equal(
            spectral.eigenvalues(model.discretise(), family), spectral.eigenvalues(model, family)
        )


def test_lora_is_merged():
    """Adapters change the spectra as their product with the weights does; the model itself is left alone."""
    model = build(MODELS["Levanter gpt2"])
    config = LoraConfig(r=2, alpha=2.0, a_init_mode="random", zero_init_b=False)
    adapted = loraize(model, config, key=jax.random.PRNGKey(0))
    ours = spectral.ov_eigenvalues(adapted)
    np.testing.assert_array_equal(ours, spectral.ov_eigenvalues(merge_lora_modules(adapted)))
    assert np.abs(ours - spectral.ov_eigenvalues(model)).max() > 1e-3


def test_any_grid_of_times():
    model = build(small_config())
    fine = spectral.qk_eigenvalues(model, np.linspace(0, 1, 7))
    assert fine.shape == (7, 2, 8)
    # t = 1/3, 2/3, 1: the times of training are among them. fp32 features of equal times are equal, but e.P of 7 and
    # of 3 times may round differently, which moves all eigenvalues of a matrix by its norm times the unit of rounding.
    trained = spectral.qk_eigenvalues(model)
    np.testing.assert_allclose(fine[2::2], trained, rtol=0, atol=1e-6 * np.abs(trained).max())
    assert np.abs(fine[1] - fine[2]).max() > 1e-4


def test_summary_is_that_of_the_dense_matrices():
    model = build(small_config())
    for family in FAMILIES:
        summary = spectral.summary(model, family)
        left, right = (np.asarray(m, np.float64) for m in products(model, family))
        m = left @ right
        s, a = (m + np.swapaxes(m, -1, -2)) / 2, (m - np.swapaxes(m, -1, -2)) / 2
        size = (m**2).sum((-1, -2))
        np.testing.assert_allclose(summary.symmetric, (s**2).sum((-1, -2)) / size, rtol=1e-9)
        np.testing.assert_allclose(1 - summary.symmetric, (a**2).sum((-1, -2)) / size, rtol=1e-9)
        np.testing.assert_allclose(summary.norm, np.sqrt(size), rtol=1e-9)
        values = spectral.singular_values(model, family)
        np.testing.assert_allclose(values, np.linalg.svd(m)[1][..., : values.shape[-1]], atol=1e-9)
        np.testing.assert_allclose(summary.radius, np.abs(np.linalg.eigvals(m)).max(-1), rtol=1e-9)


def test_random_band():
    """Fresh models do not depend on the trained one; a random matrix is half symmetric, up to 1/sqrt(its size)."""
    model = build(small_config())
    band = spectral.random_summaries(model, "ff", draws=4)
    again = spectral.random_summaries(build(small_config(), seed=9), "ff", draws=4)
    assert band.radius.shape == (4, 3)
    np.testing.assert_array_equal(band.radius, again.radius)
    assert np.ptp(band.radius, axis=0).min() > 0  # draws differ
    assert np.abs(band.symmetric - 0.5).max() < 0.2
    assert isinstance(band, Summary)
    assert spectral.random_summaries(model, "qk", [0.1, 0.2], draws=1).norm.shape == (1, 2, 2)


def test_jacobian_eigenvalues():
    """Of the block's own Jacobian at the state, by plain reverse-mode differentiation."""
    model = build(small_config())
    tokens = random_tokens(batch=1)["batch", 0]
    ours = spectral.jacobian_eigenvalues(model, tokens, position=4)
    states = model.trajectory(tokens).array
    flow = model.discretise().transformer.flow

    def field(x):
        block = at(flow.weights, 2 / 3)
        return block(hax.named(x, ("position", "embed")), Inputs.of()).array[4]

    dense = np.linalg.eigvals(np.asarray(jax.jacrev(field)(states[0])[:, 4], np.float64))
    np.testing.assert_allclose(np.sort(np.abs(ours[1])), np.sort(np.abs(dense)), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"position must lie in -\d+\.\.\d+ for \d+ tokens, got 99"):
        spectral.jacobian_eigenvalues(model, tokens, position=99)


def test_refusals():
    flow, ordinary = build(small_config()), build(MODELS["Levanter gpt2"])
    with pytest.raises(UserError, match=r"no value at t = 0\.25"):
        spectral.qk_eigenvalues(ordinary, [0.25])
    assert spectral.qk_eigenvalues(ordinary, [2 / 3]).shape[0] == 1
    with pytest.raises(UserError, match="no value at t"):
        spectral.qk_eigenvalues(flow.discretise(), [0.25])
    with pytest.raises(UserError, match=r"in \[0, 1\], got 1.5"):
        spectral.qk_eigenvalues(flow, [0.5, 1.5])
    with pytest.raises(UserError, match="got none"):
        spectral.qk_eigenvalues(flow, [])
    with pytest.raises(UserError, match="must be numbers"):
        spectral.qk_eigenvalues(flow, ["now"])
    with pytest.raises(UserError, match="Choices: qk, ov, ff"):
        spectral.eigenvalues(flow, "kq")
    ssm = build(small_config("constant", block=SsmBlockConfig(num_heads=2, state_size=4)))
    assert spectral.qk_eigenvalues(ssm).shape == (3, 2, 8)
    with pytest.raises(UserError, match="no FF spectrum"):
        spectral.ff_eigenvalues(ssm)
    with pytest.raises(UserError, match="draws"):
        spectral.random_summaries(flow, "qk", draws=0)
