"""Self-attention of Llama: separate query, key and value, rotary positions, keys and values shared by groups."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import RotaryEmbeddings, RotaryEmbeddingsConfig

from qkvflow.axes import HEAD_SIZE, HEADS, KV_HEAD, POSITION, Q_HEADS_PER_GROUP
from qkvflow.blocks.attention import attend
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.memory import KeysValues


class GroupedQueryAttention(eqx.Module):
    """softmax(R(q) R(k)^T / sqrt(head_size)) v, then the output projection; R rotates by position.

    Attributes:
        q_proj: {embed} -> {heads, head_size};  k_proj, v_proj: {embed} -> {kv_head, head_size};
        o_proj: {heads, head_size} -> {embed}. Head h reads the keys of kv_head h // (heads / kv_head).

    Differs from Levanter's Llama, whose q_proj has the axes {kv_head, q_heads_per_group, head_size}: here `heads`, so
    that a mesh can divide q and o over more devices than there are key-value heads. For tensor parallelism map both
    `heads` and `kv_head`; no array has both.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    rotary: RotaryEmbeddings
    inference: bool
    dropout: float = eqx.field(static=True)
    backend: AttentionBackend | None = eqx.field(static=True)
    flash_block_size: int | None = eqx.field(static=True)

    @staticmethod
    def init(
        Embed: Axis,
        Heads: Axis,
        KvHead: Axis,
        HeadSize: Axis,
        rope: RotaryEmbeddingsConfig,
        *,
        key,
        use_bias: bool = False,
        dropout: float = 0.0,
        backend: AttentionBackend | None = None,
        flash_block_size: int | None = None,
    ) -> "GroupedQueryAttention":
        def linear(In, Out, key):
            return hnn.Linear.init(In, Out, key=key, use_bias=use_bias, out_first=False)

        k_q, k_k, k_v, k_o = jax.random.split(key, 4)
        return GroupedQueryAttention(
            linear(Embed, (Heads, HeadSize), k_q),
            linear(Embed, (KvHead, HeadSize), k_k),
            linear(Embed, (KvHead, HeadSize), k_v),
            linear((Heads, HeadSize), Embed, k_o),
            rope.build(HeadSize),
            False,
            dropout,
            backend,
            flash_block_size,
        )

    def extend(self, x: NamedArray, inputs: Inputs, memory: KeysValues | None, *, key=None):
        """{..., position, embed} -> {..., position, embed}, and the memory extended by the positions of x."""
        pos_ids = hax.arange(x.resolve_axis(POSITION)) if inputs.pos_ids is None else inputs.pos_ids
        q = self.rotary(inputs.see("attn.q", self.q_proj(x)), pos_ids)
        k = self.rotary(inputs.see("attn.k", self.k_proj(x)), pos_ids).rearrange((..., KV_HEAD, POSITION, HEAD_SIZE))
        v = inputs.see("attn.v", self.v_proj(x).rearrange((..., KV_HEAD, POSITION, HEAD_SIZE)))
        KvHead, Heads = k.resolve_axis(KV_HEAD), q.resolve_axis(HEADS)
        Group = Axis(Q_HEADS_PER_GROUP, Heads.size // KvHead.size)
        q = q.unflatten_axis(HEADS, (KvHead, Group))
        q = q.rearrange((..., KV_HEAD, Q_HEADS_PER_GROUP, POSITION, HEAD_SIZE))
        out, memory = attend(self, q, k, v, inputs, memory, key=key)
        out = inputs.see("attn.heads", out.astype(x.dtype).flatten_axes((KvHead, Group), Heads))
        return inputs.see("attn.out", self.o_proj(hax.auto_sharded(out))), memory

    def memory(self, Batch: Axis, length: int, dtype) -> KeysValues:
        """An empty memory for `length` positions."""
        KvHead, HeadSize = self.k_proj.Out
        return KeysValues.empty(Batch, KvHead, length, HeadSize, dtype)
