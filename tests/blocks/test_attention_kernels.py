"""`attn_backend`: all kernels compute the same attention, with causal masks and documents; a TPU's runs in Pallas's
interpreter here. What a kernel cannot take is refused where it was asked for by name, and told where it was not."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.layers.attention as levanter_attention
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

Batch, Heads, Pos, Size = Axis("batch", 2), Axis("heads", 2), Axis("position", 128), Axis("head_size", 64)
Keys = Pos.alias("key_position")
# Two documents of different lengths in each row.
SEGMENTS = hax.named(jnp.asarray(np.arange(128)[None] >= np.array([[40], [100]])).astype(jnp.int32), (Batch, Pos))


@pytest.fixture
def splash(monkeypatch):
    """Levanter's call of the TPU kernel, interpreted; within a mesh of this device, which it asks for."""
    kernel = levanter_attention.splash_attention_kernel
    interpreted = functools.partial(kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(levanter_attention.splash_attention_kernel, "make_splash_mha", interpreted)
    with set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))), hax.axis_mapping({}):
        yield


def inputs(dtype):
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    axes = ((Batch, Heads, Pos, Size), (Batch, Heads, Keys, Size), (Batch, Heads, Keys, Size))
    return [hax.random.normal(key, own).astype(dtype) for key, own in zip(keys, axes, strict=True)]


def attention(backend, dtype, documents: bool, **options):
    """Outputs, and the gradient of a weighted sum of them by queries, keys and values."""
    mask = AttentionMask.causal()
    mask = mask.with_segment_ids(SEGMENTS) if documents else mask

    def out(arrays):
        return dot_product_attention(
            "position", "key_position", "head_size", *arrays, mask=mask, attn_backend=backend, **options
        ).rearrange((Batch, Heads, Pos, Size))

    weights = hax.random.normal(jax.random.PRNGKey(1), (Batch, Heads, Pos, Size))
    loss = jax.jit(jax.grad(lambda arrays: hax.sum(out(arrays).astype(jnp.float32) * weights).array))
    given = inputs(dtype)
    return [x.array.astype(jnp.float32) for x in (jax.jit(out)(given), *loss(given))]


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_kernels_agree(splash, dtype, tolerance, documents):
    """fp32 within sums in another order; bf16 within a few of its roundings (2^-8) of numbers around 1."""
    expected = attention(AttentionBackend.VANILLA, jnp.float32, documents)
    cases = {AttentionBackend.SPLASH: {}, AttentionBackend.JAX_FLASH: {"flash_block_size": 32}}
    for backend, options in (cases | {AttentionBackend.VANILLA: {}}).items():
        for found, own in zip(attention(backend, dtype, documents, **options), expected, strict=True):
            scale = float(jnp.abs(own).max())
            assert float(jnp.abs(found - own).max()) <= tolerance * scale, (backend, dtype)


def test_what_a_kernel_cannot_take(splash):
    options = {"dropout": 0.5, "inference": False, "prng": jax.random.PRNGKey(2)}
    with pytest.raises(NotImplementedError, match="does not support dropout"):
        attention(AttentionBackend.SPLASH, jnp.float32, False, **options)
