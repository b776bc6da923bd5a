"""Causal self-attention of GPT-2, with fused query, key and value, by Levanter's attention kernels."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from qkvflow.axes import HEAD_SIZE, HEADS, KEY_POSITION, POSITION, QKV


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
        out = dot_product_attention(
            POSITION,
            KEY_POSITION,
            HEAD_SIZE,
            q,
            k.rename({POSITION: KEY_POSITION}),
            v.rename({POSITION: KEY_POSITION}),
            mask=mask,
            # Differs from the official code and from Levanter's GPT-2, which read attn_pdrop and never apply it.
            dropout=self.dropout,
            inference=self.inference,
            prng=key,
            attn_backend=self.backend,
            flash_block_size=self.flash_block_size,
        )
        return self.c_proj(hax.auto_sharded(out.astype(x.dtype)))
