"""What an evaluation of B stores of earlier positions, so that later ones need not recompute them.

Keys and values for attention, the state of a recurrence for a state-space mixer. Each evaluation of B has its own
memory, because each sees different states x(t).
"""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import BATCH, BATCH_HEADS, HEAD_SIZE, KEY_POSITION, POSITION

# Sequences whose keys a compiled program writes one after another; more are a loop, which bounds the compile time.
UNROLLED_ROWS = 8


class Window(eqx.Module):
    """The new positions start, start + 1, ... of each sequence, of which the first `count` are real.

    The others are padding: the keys that they write are never seen, because the next window of their sequence starts at
    those positions; they do not change states of recurrences.

    Attributes:
        trial: some of the positions may be rolled back. Keys need nothing for this; states of recurrences are kept
            after each position, until `settled` says how many positions stay.
        written: the memory already has the keys of these positions and is only read; states of recurrences are those
            before these positions.
    """

    start: NamedArray  # {batch}, int32
    count: NamedArray  # {batch}, int32
    trial: bool = eqx.field(static=True, default=False)
    written: bool = eqx.field(static=True, default=False)

    def positions(self, New: Axis) -> NamedArray:
        """{batch, position}: the places in the sequence of the new positions `New`."""
        return self.start.broadcast_axis(New).rearrange((BATCH, New.name)) + hax.arange(New, dtype=jnp.int32)

    def real(self, New: Axis) -> NamedArray:
        """{batch, position} bool: which new positions are real."""
        return hax.arange(New, dtype=jnp.int32) < self.count.broadcast_axis(New).rearrange((BATCH, New.name))


class KeysValues(eqx.Module):
    """Keys and values of one attention layer: {batch_heads, position, head_size}; column p holds position p.

    The heads of all sequences share one axis, so that a matrix product can use the arrays directly. With two axes, XLA
    merges them first and copies the memory at each step.
    """

    k: NamedArray
    v: NamedArray

    @staticmethod
    def empty(Batch: Axis, Heads: Axis, length: int, HeadSize: Axis, dtype) -> "KeysValues":
        axes = (Axis(BATCH_HEADS, Batch.size * Heads.size), Axis(POSITION, length), HeadSize)
        return KeysValues(hax.zeros(axes, dtype), hax.zeros(axes, dtype))

    def extended(self, k: NamedArray, v: NamedArray, window: Window) -> "KeysValues":
        """With the keys and values of the window's positions: {batch, heads, position, head_size}."""
        if window.written:
            return self
        return KeysValues(_write(self.k, k, window.start), _write(self.v, v, window.start))

    def merged(self, q: NamedArray, Heads: Axis) -> NamedArray:
        """{batch, heads, ..., position, head_size} -> {batch_heads, ..., position, head_size}."""
        Batch = q.resolve_axis(BATCH)
        return q.rearrange((Batch, Heads, ...)).flatten_axes((Batch, Heads), self.k.axes[0])

    def visible(self, New: Axis, window: Window) -> NamedArray:
        """{batch_heads, position, key_position} bool: a position sees itself and those before it."""
        Rows, Keys = self.k.axes[0], self.k.resolve_axis(POSITION).alias(KEY_POSITION)
        Heads = Axis(BATCH_HEADS, Rows.size // window.start.size)
        positions = window.positions(New).broadcast_axis(Heads).rearrange((BATCH, BATCH_HEADS, New.name))
        positions = positions.flatten_axes((BATCH, BATCH_HEADS), Rows)
        return positions.broadcast_axis(Keys) >= hax.arange(Keys)


Form = tuple[jax.tree_util.PyTreeDef, tuple[bool, ...]]


def parted(memory) -> tuple[tuple[KeysValues, ...], tuple[NamedArray, ...], Form]:
    """The keys and values in a memory, the states of its recurrences, and what puts them together again."""
    leaves, structure = _leaves(memory)
    are_keys = tuple(isinstance(leaf, KeysValues) for leaf in leaves)
    keys = tuple(leaf for leaf in leaves if isinstance(leaf, KeysValues))
    return keys, tuple(leaf for leaf in leaves if not isinstance(leaf, KeysValues)), (structure, are_keys)


def joined(keys: Sequence[KeysValues], states: Sequence[NamedArray], form: Form):
    """The memory that `parted` gives the parts of."""
    structure, are_keys = form
    next_key, next_state = iter(keys), iter(states)
    return jax.tree.unflatten(structure, [next(next_key if is_key else next_state) for is_key in are_keys])


def states(memory) -> list[NamedArray]:
    """The states of all recurrences in a memory: what must be restored if positions are rolled back."""
    return [leaf for leaf in _leaves(memory)[0] if isinstance(leaf, NamedArray)]


def with_states(memory, states: Sequence[NamedArray]):
    """The memory with other states of its recurrences, in the order of `states(memory)`."""
    leaves, structure = _leaves(memory)
    new = iter(states)
    return jax.tree.unflatten(structure, [next(new) if isinstance(leaf, NamedArray) else leaf for leaf in leaves])


def keys_of(memory, before):
    """The memory with the states of recurrences that it had `before` a window: what a `written` one reads."""
    return with_states(memory, states(before))


def settled(memory, last: NamedArray):
    """The memory after a window on trial of which the positions 0..`last` {batch} stay."""

    def chosen(state: NamedArray) -> NamedArray:
        every = state.rearrange((BATCH, POSITION, ...))
        index = last.array.reshape(-1, *[1] * (every.array.ndim - 1))
        array = jnp.take_along_axis(every.array, index, axis=1)[:, 0]
        return hax.named(array, (every.axes[0], *every.axes[2:]))

    return with_states(memory, [chosen(state) for state in states(memory)])


def _leaves(memory):
    return jax.tree.flatten(memory, is_leaf=lambda m: isinstance(m, KeysValues | NamedArray))


def _write(memory: NamedArray, new: NamedArray, start: NamedArray) -> NamedArray:
    sequences = new.rearrange((BATCH, ..., POSITION, HEAD_SIZE)).array.astype(memory.dtype)
    starts = start.array.astype(jnp.int32)
    rows, heads = sequences.shape[:2]

    def with_row(array, row):  # updates in place; one for all sequences would be a scatter
        at = (jnp.asarray(row * heads, jnp.int32), starts[row], jnp.int32(0))
        return jax.lax.dynamic_update_slice(array, jax.lax.dynamic_index_in_dim(sequences, row, keepdims=False), at)

    def with_group(group, array):
        for i in range(UNROLLED_ROWS):
            array = with_row(array, group * UNROLLED_ROWS + i)
        return array

    groups = rows // UNROLLED_ROWS if rows > UNROLLED_ROWS else 0
    array = jax.lax.fori_loop(0, groups, with_group, memory.array)
    for row in range(groups * UNROLLED_ROWS, rows):
        array = with_row(array, row)
    return hax.named(array, memory.axes)
