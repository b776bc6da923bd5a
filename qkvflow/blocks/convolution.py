"""A causal convolution along positions with a filter for each channel, added to its input: y = x + w * x.

    y_k = x_k + sum_{j < taps} w_j x_{k-j},   w: {taps, embed}, zero at first, so that the block starts as without it

Positions before the first one of their document count as zero.

Source: Allen-Zhu, Physics of Language Models: Part 4.1 (2025), the Canon layer at place A: kernel of 4, a residual, no
activation, between the norm and the attention. Differs from it: the filter starts at zero.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask

from qkvflow.axes import BATCH, EMBED, POSITION, TAPS
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.memory import KeysValues


class Convolution(eqx.Module):
    """{..., position, embed} -> {..., position, embed}, causal.

    Attributes:
        weight: {taps, embed}.
    """

    weight: NamedArray

    @staticmethod
    def init(Embed: Axis, taps: int) -> "Convolution":
        return Convolution(hax.zeros((Axis(TAPS, taps), Embed)))

    def __call__(self, x: NamedArray, mask: AttentionMask | NamedArray | None) -> NamedArray:
        """Documents packed in one sequence, by the segment ids of `mask`, do not see each other."""
        array = x.rearrange((..., POSITION, EMBED)).array
        weight = self._weight(x)
        total = array * (1 + weight[0])
        for j in range(1, len(weight)):
            total = total + weight[j] * _behind(array, j) * _same_document(mask, x, j)
        return hax.named(total, x.rearrange((..., POSITION, EMBED)).axes).rearrange(x.axes)

    def extend(self, x: NamedArray, inputs: Inputs, before: NamedArray | None) -> tuple[NamedArray, NamedArray | None]:
        """The same, continued from the inputs `before` x, {batch, taps, embed} with one less than the filter; and those
        before what comes next. In a window on trial these after each position, {batch, position, taps, embed}."""
        if before is None:
            return self(x, inputs.mask), None
        New, weight = x.resolve_axis(POSITION), self._weight(x)
        new = x.rearrange((BATCH, POSITION, EMBED)).array
        whole = jnp.concatenate([before.array.astype(x.dtype), new], axis=1)
        kept = len(weight) - 1
        total = new * (1 + weight[0])
        for j in range(1, len(weight)):
            total = total + weight[j] * whole[:, kept - j : kept - j + New.size]
        y = hax.named(total, x.rearrange((BATCH, POSITION, EMBED)).axes).rearrange(x.axes)
        # Padding leaves them as they were after the last real position.
        ends = jnp.minimum(jnp.arange(1, New.size + 1)[None], inputs.window.count.array[:, None])
        ends = ends if inputs.window.trial else ends[:, -1:]
        rows = jnp.arange(len(whole))[:, None, None]
        last = whole[rows, ends[..., None] + jnp.arange(kept)[None, None]].astype(before.dtype)
        if not inputs.window.trial:
            return y, hax.named(last[:, 0], before.axes)
        Batch, *rest = before.axes
        return y, hax.named(last, (Batch, New, *rest))

    def nothing_before(self, Batch: Axis, dtype) -> NamedArray:
        """The inputs before the first position: zeros {batch, taps, embed}."""
        Taps = self.weight.resolve_axis(TAPS)
        return hax.zeros((Batch, Taps.resize(Taps.size - 1), self.weight.resolve_axis(EMBED)), dtype)

    def _weight(self, x: NamedArray) -> jax.Array:
        """[taps, ..., embed], each of the rank of x."""
        weight = self.weight.rearrange((TAPS, EMBED)).array.astype(x.dtype)
        return weight.reshape(len(weight), *[1] * (x.ndim - 1), -1)


class ConvolvedMemory(eqx.Module):
    """Keys and values of the attention, and the last inputs of the convolution, {batch, taps, embed}."""

    attn: KeysValues
    before: NamedArray


def _behind(array: jax.Array, j: int) -> jax.Array:
    """[..., position, embed] moved j positions back, with zeros in front."""
    padding = [(0, 0)] * array.ndim
    padding[-2] = (j, 0)
    return jnp.pad(array, padding)[..., : array.shape[-2], :]


def _same_document(mask: AttentionMask | NamedArray | None, x: NamedArray, j: int):
    """1 where a position and the one j before it are of one document, else 0; [..., position, 1]."""
    if not isinstance(mask, AttentionMask) or mask.segment_ids is None:
        return 1
    batch = tuple(a for a in x.axes if a.name not in (POSITION, EMBED))
    own = mask.segment_ids[0].broadcast_axis(batch).rearrange((*batch, POSITION)).array[..., None]
    return (own == _behind(own, j)).astype(x.dtype)  # before the first position x is zero anyway
