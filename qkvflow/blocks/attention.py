"""Self-attention by Levanter's kernels: the product itself, and GPT-2's layer with fused query, key and value."""

from typing import Protocol

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from qkvflow.axes import HEAD_SIZE, HEADS, KEY_POSITION, POSITION, QKV


class AttentionKernel(Protocol):
    """What `attend` reads of a layer: dropout of the attention weights, and the kernel."""

    inference: bool
    dropout: float
    backend: AttentionBackend | None
    flash_block_size: int | None


def attend(layer: AttentionKernel, q: NamedArray, k: NamedArray, v: NamedArray, mask, *, key=None) -> NamedArray:
    """softmax(q k^T / sqrt(head_size)) v, with dropout of the weights.

    q: {..., position, head_size}; k, v: {..., position, head_size}; axes that all three have are heads, those that
    only q has share the keys and values (grouped queries). `mask=None` attends to everything.
    """
    return dot_product_attention(
        POSITION,
        KEY_POSITION,
        HEAD_SIZE,
        q,
        k.rename({POSITION: KEY_POSITION}),
        v.rename({POSITION: KEY_POSITION}),
        mask=mask,
        # Differs from the official code and from Levanter's models, which never apply dropout to the weights.
        dropout=layer.dropout,
        inference=layer.inference,
        prng=key,
        attn_backend=layer.backend,
        flash_block_size=layer.flash_block_size,
    )


class Gpt2Attention(eqx.Module):
    """softmax(Q K^T / sqrt(head_size)) V, then the output projection.

    c_attn: {embed} -> {qkv, heads, head_size};  c_proj: {heads, head_size} -> {embed}.
    """

    c_attn: hnn.Linear
    c_proj: hnn.Linear
    inference: bool
    dropout: float = eqx.field(static=True)
    backend: AttentionBackend | None = eqx.field(static=True)
    flash_block_size: int | None = eqx.field(static=True)

    @staticmethod
    def init(
        Embed: Axis,
        Heads: Axis,
        HeadSize: Axis,
        *,
        key,
        use_bias: bool = True,
        dropout: float = 0.0,
        backend: AttentionBackend | None = None,
        flash_block_size: int | None = None,
    ) -> "Gpt2Attention":
        k_attn, k_proj = jax.random.split(key)
        Qkv = Axis(QKV, 3)
        c_attn = hnn.Linear.init(Embed, (Qkv, Heads, HeadSize), key=k_attn, use_bias=use_bias, out_first=False)
        c_proj = hnn.Linear.init((Heads, HeadSize), Embed, key=k_proj, use_bias=use_bias, out_first=False)
        return Gpt2Attention(c_attn, c_proj, False, dropout, backend, flash_block_size)

    def __call__(self, x: NamedArray, mask: AttentionMask | NamedArray | None, *, key=None) -> NamedArray:
        """{..., position, embed} -> {..., position, embed}. `mask=None` attends to everything."""
        qkv = self.c_attn(x).rearrange((..., QKV, HEADS, POSITION, HEAD_SIZE))
        q, k, v = qkv.unbind(QKV)
        out = attend(self, q, k, v, mask, key=key)
        return self.c_proj(hax.auto_sharded(out.astype(x.dtype)))
