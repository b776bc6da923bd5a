"""Attention kernels that run on a CPU equal vanilla attention; what a kernel cannot handle falls back with a notice.

Splash, a Pallas kernel for TPUs, runs in Pallas' interpret mode. Tolerances are relative to the largest value. fp32:
sums of 256 terms in a different order, at most 256 * 2^-24 = 1.5e-5. bf16: inputs are exact; kernels round scores,
weights and results to 2^-9; scores reach 4, so weights have errors of 4 * 2^-9 = 0.008, and gradients, which are
products of two such factors, up to 0.03.
"""

import functools
import importlib.util
import re
import types
import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers import attention as levanter_attention
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention
from levanter.trainer import TrainerConfig
from levanter.utils.mesh import MeshConfig

from qkvflow.blocks import kernels
from qkvflow.blocks.attention import attend
from qkvflow.blocks.config import BlockConfig
from qkvflow.blocks.inputs import Inputs
from qkvflow.config import decode
from qkvflow.errors import Notice, UserError

SLOW = pytest.mark.slow
LENGTH = 256
AXES = {
    "gpt2": (Axis("batch", 2), Axis("heads", 2)),
    "grouped": (Axis("batch", 2), Axis("kv_head", 2), Axis("q_heads_per_group", 2)),
}
TOLERANCE = {jnp.float32: (2e-6, 1e-5), jnp.bfloat16: (0.01, 0.03)}  # of results, of gradients


@pytest.fixture(autouse=True)
def fresh():
    """Each test is told what an earlier one was."""
    kernels._tell.cache_clear()


def be_on(monkeypatch, best: str) -> None:
    """Levanter, and what chooses here, take this for a machine whose best kernel is `best`; splash is interpreted."""
    monkeypatch.setattr(levanter_attention, "default_attention_type", lambda: AttentionBackend(best))
    splash = levanter_attention.splash_attention_kernel
    monkeypatch.setattr(splash, "make_splash_mha", functools.partial(splash.make_splash_mha, interpret=True))


def layer(backend: str | None = None, dropout: float = 0.0, inference: bool = False, block: int | None = 128):
    named = None if backend is None else AttentionBackend(backend)
    return types.SimpleNamespace(inference=inference, dropout=dropout, backend=named, flash_block_size=block)


def material(form: str = "gpt2", head_size: int = 32, dtype=jnp.float32, length: int = LENGTH):
    """Queries, keys and values; and what a result is multiplied with for its gradient."""
    axes, rest = AXES[form], (Axis("position", length), Axis("head_size", head_size))
    few = tuple(a for a in axes if a.name != "q_heads_per_group")
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    q, k, v, g = (
        hax.random.normal(key, (*a, *rest)).astype(dtype) for key, a in zip(keys, (axes, few, few, axes), strict=True)
    )
    return (q, k, v), g


def masks(segments: bool, length: int = LENGTH) -> AttentionMask:
    """Causal; with `segments` three texts, cut otherwise in each sequence and not where blocks end."""
    if not segments:
        return AttentionMask.causal()
    cuts = np.array([[50, 200], [129, 131]])
    ids = (np.arange(length)[None, :, None] >= cuts[:, None, :]).sum(-1)
    ids = hax.named(jnp.asarray(ids, jnp.int32), (Axis("batch", 2), Axis("position", length)))
    return AttentionMask.causal().with_segment_ids(ids)


def attended(layer, qkv, g, mask, key=None):
    """The result, and gradients of q, k, v; inside of a mesh, as splash wants it."""

    def of(qkv):
        out, _ = attend(layer, *qkv, Inputs(mask=mask), key=key)
        return hax.sum((out * g).astype(jnp.float32)).scalar(), out

    with TrainerConfig(mesh=MeshConfig()).use_device_mesh():
        (_, out), gradients = eqx.filter_jit(eqx.filter_value_and_grad(of, has_aux=True))(qkv)
    return [
        np.asarray(a.rearrange(b.axes).array, np.float32) for a, b in zip((out, *gradients), (g, *qkv), strict=True)
    ]


def error(found, expected) -> list[float]:
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True)]


def told(made) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made()
    return [str(w.message) for w in said if issubclass(w.category, Notice)]


@pytest.mark.parametrize("segments", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("form", ["gpt2", pytest.param("grouped", marks=SLOW)])
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=SLOW), jnp.bfloat16])
@pytest.mark.parametrize("backend", ["splash", "jax_flash"])
def test_a_kernel_is_the_attention_of_all_scores(monkeypatch, backend, dtype, form, segments):
    be_on(monkeypatch, "splash")
    mask = masks(segments)
    exact = material(form)
    qkv, g = material(form, dtype=dtype)
    exact = tuple(a.astype(jnp.float32) for a in qkv), g.astype(jnp.float32)
    expected = attended(layer("vanilla"), *exact, mask)
    found = error(attended(layer(backend), qkv, g, mask), expected)
    assert found[0] < TOLERANCE[dtype][0], found
    assert max(found[1:]) < TOLERANCE[dtype][1], found
    if segments:  # they are no small matter
        assert error(attended(layer("vanilla"), *exact, masks(False)), expected)[0] > 0.1
    if backend == "splash" and dtype == jnp.bfloat16:  # its scores are fp32, those of `vanilla` bf16
        assert found[0] < error(attended(layer("vanilla"), qkv, g, mask), expected)[0]


@pytest.mark.parametrize("size", [1.0, 1e5, 1e15])
@pytest.mark.parametrize("backend", ["vanilla", "jax_flash", "splash"])
def test_no_score_is_below_those_of_masked_keys(monkeypatch, backend, size):
    be_on(monkeypatch, "splash")
    (q, k, v), g = material()
    q, k = size * abs(q), -size * abs(k)  # all scores are negative

    def seen(k, v):
        return attended(layer(backend), (q, k, v), g, masks(False))[0][:, :, :130]

    later = hax.arange(q.resolve_axis("position")) >= 130
    other = seen(hax.where(later, 0.5 * k, k), hax.where(later, -v, v))
    np.testing.assert_array_equal(seen(k, v), other)


@SLOW
@pytest.mark.parametrize("head_size", [12, 48, 80])
@pytest.mark.parametrize("backend", ["splash", "jax_flash"])
def test_any_head_size(monkeypatch, backend, head_size):
    be_on(monkeypatch, "splash")
    qkv, g = material(head_size=head_size)
    assert told(lambda: attended(layer(backend), qkv, g, masks(True))) == []
    found = error(attended(layer(backend), qkv, g, masks(True)), attended(layer("vanilla"), qkv, g, masks(True)))
    assert max(found) < 1e-5


def test_splash_is_given_the_compute_precision(monkeypatch):
    """Not copies in fp32, which Levanter makes if it is told nothing."""
    be_on(monkeypatch, "splash")
    qkv, _ = material(dtype=jnp.bfloat16)
    with TrainerConfig(mesh=MeshConfig()).use_device_mesh():
        text = str(jax.make_jaxpr(lambda qkv: attend(layer(), *qkv, Inputs(mask=masks(False)))[0].array)(qkv))
    before, kernel, _ = text.partition("pallas_call")
    assert kernel
    assert "bf16[2,2,256,32]" in before
    assert not re.search(r"\bf32\[2,2,256,32\]", before)


@SLOW
@pytest.mark.parametrize("best", ["splash", "jax_flash"])
def test_dropout_of_the_weights_is_that_of_all_scores(monkeypatch, best):
    """In training it needs the weights, which the other kernels never hold; in evaluation there is none."""
    be_on(monkeypatch, best)
    qkv, g = material()
    key = jax.random.PRNGKey(1)
    ours, plain = layer(best, dropout=0.3), layer("vanilla", dropout=0.3)
    (text,) = told(lambda: attended(ours, qkv, g, masks(True), key))
    assert text == (
        f"attention cannot be computed by {best}: it has no dropout of the attention weights (attn_pdrop)."
        " Falling back to vanilla"
    )
    found, expected = attended(ours, qkv, g, masks(True), key), attended(plain, qkv, g, masks(True), key)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    whole = attended(layer("vanilla"), qkv, g, masks(True))
    assert error(found, whole)[0] > 0.1
    evaluated = layer(best, dropout=0.3, inference=True)
    kernels._tell.cache_clear()
    assert told(lambda: attended(evaluated, qkv, g, masks(True))) == []
    assert max(error(attended(evaluated, qkv, g, masks(True)), whole)) < 1e-5


def test_levanters_flash_attention_drops_scores():
    """Why `jax_flash` is not given dropout: weights that add up to 1 whatever is dropped are not dropped weights."""
    (q, k, v), _ = material()
    v = hax.ones_like(v)

    def by(backend):
        k_, v_ = (a.rename({"position": "key_position"}) for a in (k, v))
        options = dict(dropout=0.5, inference=False, prng=jax.random.PRNGKey(1), flash_block_size=128)
        axes = ("position", "key_position", "head_size")
        out = dot_product_attention(*axes, q, k_, v_, mask=masks(False), attn_backend=backend, **options)
        return np.asarray(out.array)

    assert np.abs(by(AttentionBackend.JAX_FLASH) - 1).max() < 1e-5
    assert np.abs(by(AttentionBackend.VANILLA) - 1).max() > 0.5


@pytest.mark.parametrize(
    ("best", "named", "given", "kernel", "said"),
    [
        ("jax_flash", None, dict(positions=2048), "jax_flash", None),
        ("jax_flash", None, dict(positions=128), "vanilla", None),
        ("jax_flash", "default", dict(positions=1500), "vanilla", "whole blocks of 1024 .*, not 1500"),
        ("jax_flash", "jax_flash", dict(positions=64), "vanilla", "whole blocks of 1024"),
        ("jax_flash", "splash", dict(positions=1024), "jax_flash", "by splash: it is for TPUs. Falling back to jax_fl"),
        (
            "jax_flash",
            "nvte",
            dict(positions=64),
            "vanilla",
            "by nvte: it is for NVIDIA's GPUs. Falling back to vanilla",
        ),
        ("jax_flash", "vanilla", dict(positions=1024), "vanilla", None),
        ("splash", None, dict(positions=1024), "splash", None),
        ("splash", None, dict(positions=1024, dropout=0.1), "vanilla", "no dropout of the attention weights"),
        ("splash", None, dict(positions=100), "vanilla", "multiples of 128, not 100. Falling back to vanilla"),
        ("splash", None, dict(positions=1024, block_size=64), "jax_flash", "multiples of 128, not 64"),
        ("splash", "nvte", dict(positions=1024), "splash", "it is for NVIDIA's GPUs. Falling back to splash"),
        ("splash", "jax_flash", dict(positions=1024), "jax_flash", None),
        ("nvte", None, dict(positions=1024), "nvte", None),
        ("nvte", None, dict(positions=1024, dropout=0.1), "nvte", None),
        ("nvte", None, dict(positions=1024, head_size=12), "jax_flash", "head sizes in multiples of 8, not 12"),
        ("nvte", None, dict(positions=1024, dtype=jnp.float32), "jax_flash", "takes bf16 and fp16, not float32"),
    ],
)
def test_which_kernel(monkeypatch, best, named, given, kernel, said):
    be_on(monkeypatch, best)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    given = dict(block_size=None, head_size=64, dtype=jnp.bfloat16, dropout=0.0) | given
    chosen = []
    texts = told(lambda: chosen.append(kernels.choose_kernel(named and AttentionBackend(named), **given)))
    assert chosen == [AttentionBackend.DEFAULT if kernel == best else AttentionBackend(kernel)]
    assert len(texts) == (said is not None)
    assert said is None or re.search(said, texts[0]), texts


def test_a_gpu_without_transformer_engine_says_so_once(monkeypatch):
    be_on(monkeypatch, "nvte")
    qkv, g = material()
    assert importlib.util.find_spec("transformer_engine") is None
    (text,) = told(lambda: [attended(layer(), qkv, g, masks(True)) for _ in range(2)])
    assert (
        text == "attention cannot be computed by nvte: Transformer Engine is not installed. Falling back to jax_flash"
    )


def test_the_choice_of_a_configuration_reaches_the_kernel(monkeypatch):
    """In YAML `block: {attn_backend: vanilla}`; a name that is not known is told with those that are."""
    asked = []
    monkeypatch.setattr(
        "qkvflow.blocks.attention.choose_kernel", lambda *a: asked.append(a) or AttentionBackend.VANILLA
    )
    for block in ({"type": "gpt2", "num_heads": 2}, {"type": "llama", "num_heads": 2}, {"type": "ssm", "num_heads": 2}):
        config = decode(BlockConfig, {**block, "attn_backend": "splash", "flash_attention_block_size": 256})
        Embed, Pos = Axis("embed", 24), Axis("position", 4)
        eqx.filter_eval_shape(
            lambda c=config, E=Embed, P=Pos: c.init(E, key=jax.random.PRNGKey(0))(hax.ones((P, E)), Inputs.of())
        )
    assert {a[:4] for a in asked} == {(AttentionBackend.SPLASH, 256, 4, 12)}
    with pytest.raises(UserError, match="jax_flash"):
        decode(BlockConfig, {"type": "gpt2", "attn_backend": "flash"})
