"""Self-attention by Levanter's kernels: the product itself, and GPT-2's layer with fused query, key and value."""

from collections.abc import Sequence
from typing import Protocol

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, dot_product_attention, materialize_mask

from qkvflow.axes import (
    BATCH_HEADS,
    HEAD_SIZE,
    HEADS,
    KEY_POSITION,
    KV_HEAD,
    POSITION,
    Q_HEADS_PER_GROUP,
    QKV,
)
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.kernels import choose_kernel
from qkvflow.blocks.matrices import PartedLinear
from qkvflow.blocks.memory import KeysValues
from qkvflow.blocks.probe import apart


class AttentionKernel(Protocol):
    """What `attend` reads of a layer: dropout of the attention weights, and the kernel."""

    inference: bool
    dropout: float
    backend: AttentionBackend | None
    flash_block_size: int | None


def attend(
    layer: AttentionKernel,
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    inputs: Inputs,
    memory: KeysValues | None = None,
    *,
    key=None,
) -> tuple[NamedArray, KeysValues | None]:
    """softmax(q k^T / sqrt(head_size)) v, with dropout of the weights; and the memory extended by k and v.

    Args:
        q, k, v: {..., position, head_size}. Axes that all three have are heads, those that only q has share the keys
            and values (grouped queries).
        memory: keys and values of earlier positions, which q also attends to.
    """
    mask, bias, dropout, dtype = inputs.mask, None, 0.0 if layer.inference else layer.dropout, None
    Batch, Heads = (), ()
    if memory is not None:
        Batch, Heads = (a for a in k.axes if a.name not in (POSITION, HEAD_SIZE))
        memory = memory.extended(k, v, inputs.window)
        mask = memory.visible(q.resolve_axis(POSITION), inputs.window)
        q, k, v = memory.merged(q, Heads), memory.k, memory.v
        backend = AttentionBackend.VANILLA  # other kernels want as many queries as keys
    else:
        positions, head_size = q.axis_size(POSITION), q.axis_size(HEAD_SIZE)
        backend = choose_kernel(layer.backend, layer.flash_block_size, positions, head_size, q.dtype, dropout)
        dtype = q.dtype  # else splash copies q, k and v to fp32; its scores are fp32 anyway
    if backend is AttentionBackend.VANILLA:
        mask, bias = None, _masking_bias(mask, q, k)
    else:
        q, k = _limited(q), _limited(k)
    out = dot_product_attention(
        POSITION,
        KEY_POSITION,
        HEAD_SIZE,
        q,
        k.rename({POSITION: KEY_POSITION}),
        v.rename({POSITION: KEY_POSITION}),
        mask=mask,
        bias=bias,
        # Differs from the official code and from Levanter's models, which never apply dropout to the weights.
        dropout=dropout,
        inference=layer.inference,
        prng=key,
        attention_dtype=dtype,
        attn_backend=backend,
        flash_block_size=layer.flash_block_size,
    )
    if memory is not None:
        return out.unflatten_axis(BATCH_HEADS, (Batch, Heads)), memory
    # Kernels do not keep the pattern: it is computed separately if requested, and used if edited.
    pattern, attended = lambda: _pattern(q, k, inputs.mask), lambda p, out=out: _attended(p, v, out)
    return inputs.beside("attn.pattern", pattern, attended, out), None


def _masking_bias(mask, q: NamedArray, k: NamedArray) -> NamedArray | None:
    """What is added to scores: 0 for keys that a query may see, far below all scores for others; None without a mask.

    Differs from the official code and from Levanter's kernels, which replace these scores by -1e9 or -1e10: weights
    that have grown without bounds have lower scores for the keys that they may see, and then see the future.
    """
    seen = materialize_mask(mask, q.resolve_axis(POSITION), k.resolve_axis(POSITION).alias(KEY_POSITION))
    return None if seen is None else hax.where(seen, 0.0, 0.5 * float(jnp.finfo(q.dtype).min)).astype(q.dtype)


def _limited(x: NamedArray) -> NamedArray:
    """Queries or keys for kernels that take no bias and may mask with -1e10: limited so that no score is below -1e9."""
    limit = (1e9 / x.axis_size(HEAD_SIZE) ** 0.5) ** 0.5
    return hax.clip(x, -limit, limit)


def _pattern(q: NamedArray, k: NamedArray, mask) -> NamedArray:
    """softmax(q k^T / sqrt(head_size)): {..., heads, position, key_position}."""
    bias, k = _masking_bias(mask, q, k), k.rename({POSITION: KEY_POSITION})
    (scores,) = apart(hax.dot(q * q.axis_size(HEAD_SIZE) ** -0.5, k, axis=HEAD_SIZE))
    pattern = hnn.softmax(scores if bias is None else scores + bias, axis=KEY_POSITION).astype(q.dtype)
    if KV_HEAD in {a.name for a in pattern.axes}:
        pattern = pattern.flatten_axes((KV_HEAD, Q_HEADS_PER_GROUP), HEADS)
    return pattern.rearrange((..., HEADS, POSITION, KEY_POSITION))


def _attended(pattern: NamedArray, v: NamedArray, out: NamedArray) -> NamedArray:
    """The values weighted by a pattern, with the axes of `out`."""
    groups = [a for a in out.axes if a.name in (KV_HEAD, Q_HEADS_PER_GROUP)]
    pattern = pattern.unflatten_axis(HEADS, groups) if groups else pattern
    attended = hax.dot(pattern, v.rename({POSITION: KEY_POSITION}), axis=KEY_POSITION)
    return attended.rearrange(out.axes).astype(out.dtype)


class Gpt2Attention(eqx.Module):
    """softmax(Q K^T / sqrt(head_size)) V, then the output projection.

    Attributes:
        c_attn: {embed} -> {qkv, heads, head_size}, in parts when it generates;  c_proj: {heads, head_size} -> {embed}.
    """

    c_attn: hnn.Linear | PartedLinear
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

    def extend(self, x: NamedArray, inputs: Inputs, memory: KeysValues | None, *, key=None):
        """{..., position, embed} -> {..., position, embed}, and the memory extended by the positions of x."""
        q, k, v = (inputs.see(f"attn.{name}", a) for name, a in zip("qkv", self._projected(x), strict=True))
        out, memory = attend(self, q, k, v, inputs, memory, key=key)
        out = inputs.see("attn.heads", out.astype(x.dtype))
        return inputs.see("attn.out", self.c_proj(hax.auto_sharded(out))), memory

    def _projected(self, x: NamedArray) -> Sequence[NamedArray]:
        """Queries, keys and values: {..., heads, position, head_size}."""
        if isinstance(self.c_attn, PartedLinear):
            return [part.rearrange((..., HEADS, POSITION, HEAD_SIZE)) for part in self.c_attn(x)]
        return self.c_attn(x).rearrange((..., QKV, HEADS, POSITION, HEAD_SIZE)).unbind(QKV)

    def memory(self, Batch: Axis, length: int, dtype) -> KeysValues:
        """An empty memory for `length` positions."""
        _, Heads, HeadSize = self.c_attn.Out
        return KeysValues.empty(Batch, Heads, length, HeadSize, dtype)
