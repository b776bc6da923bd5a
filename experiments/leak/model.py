"""A small transformer with Haliax's attention, causal, or with the fork's mistake: query and key on the same axis."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from haliax.nn.attention import causal_mask, dot_product_attention_weights

KEY_POSITION = "key_position"


class Layer(eqx.Module):
    """x + A(LN(x)), then x + F(LN(x)); attention A by Haliax.

    Haliax pairs axes by name. A causal model renames the axis of keys and values, so that scores are
    {heads, position, key_position}, and the mask {position, key_position} is a triangle. With one name for both
    (`leaks`) the product of q and k pairs each position with itself, the mask {position} is all true, and softmax and
    sum run over *all* positions: every position receives the same vector, computed from the whole sequence.
    (Haliax's `dot_product_attention` rejects a single name today; the functions it consists of do not.)
    """

    qkv: hnn.Linear
    out: hnn.Linear
    mlp: hnn.MLP
    norms: tuple[hnn.LayerNorm, hnn.LayerNorm]
    leaks: bool = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, Heads: Axis, HeadSize: Axis, *, leaks: bool, key: jax.Array) -> "Layer":
        k_qkv, k_out, k_mlp = jax.random.split(key, 3)
        return Layer(
            hnn.Linear.init(Embed, (Axis("qkv", 3), Heads, HeadSize), key=k_qkv),
            hnn.Linear.init((Heads, HeadSize), Embed, key=k_out),
            hnn.MLP.init(Embed, Embed, 4 * Embed.size, 1, activation=hnn.gelu, key=k_mlp),
            (hnn.LayerNorm.init(Embed), hnn.LayerNorm.init(Embed)),
            leaks,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """{batch, position, embed} -> the same."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def attention(self, x: NamedArray) -> NamedArray:
        """{batch, position, embed} -> the same; with the leak {batch, embed}."""
        q, k, v = self.qkv(x).unbind("qkv")
        Pos = KeyPos = x.resolve_axis("position")
        if not self.leaks:
            KeyPos = Pos.alias(KEY_POSITION)
            k, v = (a.rename({"position": KEY_POSITION}) for a in (k, v))
        weights = dot_product_attention_weights("head_size", KeyPos, q, k, mask=causal_mask(Pos, KeyPos))
        return self.out(hax.dot(weights, v, axis=KeyPos))


class Model(eqx.Module):
    """Token embeddings without positions (as the fork's), layers, a linear head."""

    embedding: hnn.Embedding
    layers: tuple[Layer, ...]
    norm: hnn.LayerNorm
    head: hnn.Linear

    @staticmethod
    def init(Vocab: Axis, *, leaks: bool, width: int = 64, heads: int = 4, layers: int = 2, key: jax.Array) -> "Model":
        Embed, Heads, HeadSize = Axis("embed", width), Axis("heads", heads), Axis("head_size", width // heads)
        k_embedding, k_head, *keys = jax.random.split(key, 2 + layers)
        return Model(
            hnn.Embedding.init(Vocab, Embed, key=k_embedding),
            tuple(Layer.init(Embed, Heads, HeadSize, leaks=leaks, key=k) for k in keys),
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, Vocab, key=k_head),
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        """{batch, position} -> logits {batch, position, vocab}."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
