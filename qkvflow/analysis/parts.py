"""The parts of blocks: attention, its matrices, the feed-forward pair.

All matrices act on rows: y = x W, with W {embed, ...} or {..., embed}. Biases and norms are not included. A stack of
blocks gives matrices with a leading axis `layers`.
"""

from functools import singledispatch
from typing import NamedTuple, NoReturn

import equinox as eqx
from haliax import Axis, NamedArray

from qkvflow.axes import HEADS, KV_HEAD, Q_HEADS_PER_GROUP, QKV
from qkvflow.blocks import Controlled
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.gpt2 import Gpt2Block, Gpt2Mlp
from qkvflow.blocks.grouped_query import GroupedQueryAttention
from qkvflow.blocks.llama import GatedMlp, LlamaBlock
from qkvflow.blocks.ssm import SsmBlock
from qkvflow.errors import UserError


class AttentionMaps(NamedTuple):
    """The linear maps of all heads.

    Keys and values shared by several query heads are repeated for each of these heads.

    Attributes:
        q, k, v: {embed, heads, head_size}.
        o: {heads, head_size, embed}.
    """

    q: NamedArray
    k: NamedArray
    v: NamedArray
    o: NamedArray


class FeedForwardMaps(NamedTuple):
    """The first and last linear maps of the MLP: {embed, mlp}, {mlp, embed}. A gate between them is left out."""

    first: NamedArray
    last: NamedArray


@singledispatch
def attention_of(block) -> eqx.Module:
    """The attention layer inside a block."""
    _unknown(block, "attention")


@singledispatch
def feed_forward_of(block) -> eqx.Module:
    """The feed-forward layer inside a block."""
    _unknown(block, "feed-forward layer")


@singledispatch
def attention_maps(attention) -> AttentionMaps:
    """The matrices of an attention layer."""
    _unknown(attention, "attention")


@singledispatch
def feed_forward_maps(mlp) -> FeedForwardMaps:
    """The matrices of a feed-forward layer."""
    _unknown(mlp, "feed-forward layer")


@attention_of.register(Gpt2Block)
@attention_of.register(SsmBlock)
def _(block):
    return block.attn


@attention_of.register(LlamaBlock)
def _(block):
    return block.self_attn


@attention_of.register
def _(block: Controlled):
    return attention_of(block.block)


@feed_forward_of.register(Gpt2Block)
@feed_forward_of.register(LlamaBlock)
def _(block):
    return block.mlp


@feed_forward_of.register
def _(block: Controlled):
    return feed_forward_of(block.block)


@feed_forward_of.register
def _(block: SsmBlock):
    raise UserError(
        "the state-space block has no feed-forward matrices (its mixer is a recurrence along positions), so there is"
        " no FF spectrum. QK and OV exist."
    )


@attention_maps.register(Gpt2Attention)
def _(attention):
    q, k, v = attention.c_attn.weight.unbind(QKV)
    return AttentionMaps(q, k, v, attention.c_proj.weight)


@attention_maps.register(GroupedQueryAttention)
def _(attention):
    q, o = attention.q_proj.weight, attention.o_proj.weight
    Heads = o.resolve_axis(HEADS)
    return AttentionMaps(q, _repeat(attention.k_proj.weight, Heads), _repeat(attention.v_proj.weight, Heads), o)


@feed_forward_maps.register(Gpt2Mlp)
def _(mlp):
    return FeedForwardMaps(mlp.c_fc.weight, mlp.c_proj.weight)


@feed_forward_maps.register(GatedMlp)
def _(mlp):
    return FeedForwardMaps(mlp.up_proj.weight, mlp.down_proj.weight)


def _repeat(array: NamedArray, Heads: Axis) -> NamedArray:
    """{..., kv_head, ...} -> {..., heads, ...}: head h reads kv_head h // (heads / kv_head)."""
    KvHead = array.resolve_axis(KV_HEAD)
    group = Axis(Q_HEADS_PER_GROUP, Heads.size // KvHead.size)
    return array.broadcast_axis(group).flatten_axes((KV_HEAD, Q_HEADS_PER_GROUP), Heads)


def _unknown(module, what: str) -> NoReturn:
    raise UserError(
        f"{type(module).__name__} has no {what} that the analysis supports. It supports gpt2, llama and ssm blocks."
    )
