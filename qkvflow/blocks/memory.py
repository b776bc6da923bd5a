"""What an evaluation of B keeps of earlier positions, so that later ones need not compute them again.

Keys and values for attention, the state of a recurrence for a state-space mixer. Each evaluation of B has a memory of
its own, since each sees other states x(t).
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import BATCH, KEY_POSITION, POSITION


class Window(eqx.Module):
    """The new positions start, start + 1, ... of each sequence, of which the first `count` are real.

    The others fill up the batch: what they leave in a memory of keys is never seen, since the next window of their
    sequence begins with them; states of recurrences they leave alone.
    """

    start: NamedArray  # {batch}, int32
    count: NamedArray  # {batch}, int32

    def positions(self, New: Axis) -> NamedArray:
        """{batch, position}: the places in the sequence of the new positions `New`."""
        return self.start.broadcast_axis(New).rearrange((BATCH, New.name)) + hax.arange(New, dtype=jnp.int32)

    def real(self, New: Axis) -> NamedArray:
        """{batch, position} bool: which new positions are real."""
        return hax.arange(New, dtype=jnp.int32) < self.count.broadcast_axis(New).rearrange((BATCH, New.name))

    def visible(self, New: Axis, length: int) -> NamedArray:
        """{batch, position, key_position} bool: a position sees itself and those before it."""
        return self.positions(New).broadcast_axis(Axis(KEY_POSITION, length)) >= hax.arange(Axis(KEY_POSITION, length))


class KeysValues(eqx.Module):
    """Keys and values of one attention layer: {batch, heads, position, head_size}; column p holds position p."""

    k: NamedArray
    v: NamedArray

    @staticmethod
    def empty(Batch: Axis, Heads: Axis, length: int, HeadSize: Axis, dtype) -> "KeysValues":
        axes = (Batch, Heads, Axis(POSITION, length), HeadSize)
        return KeysValues(hax.zeros(axes, dtype), hax.zeros(axes, dtype))

    @property
    def length(self) -> int:
        return self.k.axis_size(POSITION)

    def extended(self, k: NamedArray, v: NamedArray, window: Window) -> "KeysValues":
        """With the keys and values of the window's positions: {batch, heads, position, head_size}."""
        return KeysValues(_write(self.k, k, window.start), _write(self.v, v, window.start))


def _write(memory: NamedArray, new: NamedArray, start: NamedArray) -> NamedArray:
    new = new.rearrange([a.name for a in memory.axes]).astype(memory.dtype)

    def write(memory, new, start):
        return jax.lax.dynamic_update_slice_in_dim(memory, new, start, axis=1)

    if memory.axis_size(BATCH) == 1:  # one update in place, where the general form is a scatter
        array = write(memory.array[0], new.array[0], start.array[0])[None]
    else:
        array = jax.vmap(write)(memory.array, new.array, start.array)
    return hax.named(array, memory.axes)
