"""The engine of generation: sequences in slots, extended side by side by jitted steps whose memory is donated.

A slot holds a text. All tokens of it but the last are in the model's memory; a decoding step reads the last one and
writes the next. Slots are filled and freed independently of each other, so sequences of any length share a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Int

from qkvflow.axes import BATCH, CONTROL, POSITION
from qkvflow.blocks import Inputs, Window
from qkvflow.generation.sampling import Sampling, SamplingOptions, choose

CHUNKS = (16, 64, 256)  # numbers of positions of a prompt that are read at once; each is compiled once


class State(eqx.Module):
    """What a batch of slots holds.

    text: {batch, position}, `length` tokens each. filled: how many of them are in the memory.
    limit: the length at which a text is complete.
    """

    text: Int[Array, "batch position"]
    length: Int[Array, "batch"]
    filled: Int[Array, "batch"]
    limit: Int[Array, "batch"]
    sampling: Sampling
    control: NamedArray | None  # {batch, position, control}
    memory: Any


class Engine:
    """Generates in `slots` slots with room for `length` tokens each.

    model: a `CachedModel` or `RecomputedModel`.
    stop_tokens: after one of these a text is complete; it is part of the text.
    vocab_size: tokens from this one on are never chosen (models may have more than their tokenizer).
    control_dim: components of the model's control; None for a model without.
    """

    def __init__(
        self,
        model,
        *,
        slots: int,
        length: int,
        stop_tokens: Sequence[int] = (),
        vocab_size: int | None = None,
        control_dim: int | None = None,
    ):
        self.slots, self.length = slots, length
        self._chunks = [c for c in CHUNKS if c <= length] or [CHUNKS[0]]
        self._control_dim = control_dim
        self._options = (tuple(stop_tokens), vocab_size)
        self._model, self._model_kind = _flat(model)
        room = -(-length // self._chunks[-1]) * self._chunks[-1]
        self._state, self._state_kind = _flat(_empty(model, slots, length, room, control_dim))
        self._model, self._state = _placed(self._model, self._state)
        one = jax.tree.structure(jax.eval_shape(lambda: _empty(model, 1, length, room, control_dim)))
        self._slot_kind = _Kind(one, self._state_kind.rest)

    @property
    def compile_lengths(self) -> list[int]:
        """Lengths of prompts whose reading needs each of the compiled steps."""
        return [min(chunk + 1, self.length - 1) for chunk in self._chunks]

    def admit(
        self,
        slot: int,
        tokens: Sequence[int],
        max_new_tokens: int,
        options: SamplingOptions,
        control: np.ndarray | None = None,
    ) -> None:
        """Puts a prompt into a slot, whatever was in it.

        control: [control], or [position, control] for each position of the text to come.
        """
        text = np.zeros(self.length, np.int32)
        text[: len(tokens)] = tokens
        given = None
        if self._control_dim is not None:
            given = np.zeros((self.length, self._control_dim), np.float32)
            if control is not None:
                given[: len(control) if control.ndim == 2 else None] = control
        limit = min(len(tokens) + max_new_tokens, self.length)
        row = (text, len(tokens), limit, Sampling.of([options]), given)
        self._state = _admit(self._state, np.int32(slot), row, kind=self._state_kind)

    def cancel(self, slot: int) -> None:
        """Ends the text in a slot where it is."""
        self._state = _cancel(self._state, np.int32(slot), kind=self._state_kind)

    def prefill(self, slot: int, remaining: int) -> int:
        """Reads a piece of the prompt in a slot, of which `remaining` tokens are unread; how many it has read.

        All of a prompt but its last token must be read before `decode` continues it.
        """
        chunk = self._chunk(remaining)
        kinds = self._model_kind, self._slot_kind
        self._state = _prefill_slot(self._model, self._state, np.int32(slot), chunk, self.slots, kinds=kinds)
        return min(chunk, remaining)

    def prefill_all(self, remaining: int) -> None:
        """Reads all prompts, of which the longest has `remaining` unread tokens."""
        if remaining > 0:
            self._state = _prefill_all(self._model, self._state, self._chunk(remaining), kinds=self._kinds)

    def decode(self, steps: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Adds up to `steps` tokens to every text that is neither complete nor unread, and waits for them.

        Returns: (last token [slot], length [slot], complete [slot] bool).
        """
        self._state, newest = _decode(self._model, self._state, np.int32(steps), self._options, kinds=self._kinds)
        token, length, limit = jax.device_get(newest)
        return token, length, length >= limit

    def wait(self) -> None:
        """Waits for all steps so far, for those who measure time."""
        jax.block_until_ready(self._state)

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(text [slot, position], length [slot], complete [slot] bool)."""
        state: State = self._state_kind.join(self._state)
        text, length, limit = jax.device_get((state.text, state.length, state.limit))
        return text, length, length >= limit

    @property
    def _kinds(self) -> tuple["_Kind", "_Kind"]:
        return self._model_kind, self._state_kind

    def _chunk(self, remaining: int) -> int:
        return next((c for c in self._chunks if c >= remaining), self._chunks[-1])


def _empty(model, slots: int, length: int, room: int, control_dim: int | None) -> State:
    Batch, Pos = Axis(BATCH, slots), Axis(POSITION, length)
    control = None if control_dim is None else hax.zeros((Batch, Pos, Axis(CONTROL, control_dim)))

    def zeros():
        return jnp.zeros(slots, jnp.int32)

    sampling = Sampling.of([SamplingOptions()] * slots)
    text = jnp.zeros((slots, length), jnp.int32)
    return State(text, zeros(), zeros(), zeros(), sampling, control, model.memory(Batch, room))


def _placed(model: list, state: list) -> tuple[list, list]:
    """Both where the steps will leave them, or the second step would be compiled anew: on the one device, or, if the
    model is spread over several, the state on each of them."""
    devices = {device for a in model for device in a.devices()}
    if len(devices) == 1:
        return jax.device_put((model, state), SingleDeviceSharding(*devices))
    sharding = next(a.sharding for a in model if isinstance(a.sharding, NamedSharding))
    return model, jax.device_put(state, NamedSharding(sharding.mesh, PartitionSpec()))


def _extend(model, state: State, tokens, active, chunk: int):
    """The model at `chunk` new positions from `filled` on, of which `active` [batch] are real."""
    Batch, New = Axis(BATCH, tokens.shape[0]), Axis(POSITION, chunk)
    window = Window(hax.named(state.filled, Batch), hax.named(active.astype(jnp.int32), Batch))
    control = None
    if state.control is not None:
        at = jnp.minimum(state.filled[:, None] + jnp.arange(chunk), state.text.shape[1] - 1)
        rows = jnp.take_along_axis(state.control.array, at[..., None], axis=1)
        control = hax.named(rows, (Batch, New, state.control.axes[-1]))
    return model.extend(hax.named(tokens, (Batch, New)), Inputs(control=control, window=window), state.memory)


def _prefill(model, state: State, chunk: int) -> State:
    """One chunk of each prompt that is not read yet. Others are given an empty window."""
    count = jnp.clip(state.length - 1 - state.filled, 0, chunk)
    padded = jnp.pad(state.text, ((0, 0), (0, chunk)))
    tokens = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, chunk))(padded, state.filled)
    _, memory = _extend(model, state, tokens, count, chunk)
    return _replace(state, filled=state.filled + count, memory=memory)


def _decode_one(model, state: State, stop_tokens: tuple[int, ...], vocab_size: int | None) -> State:
    rows = jnp.arange(state.text.shape[0])
    active = _active(state)
    x, memory = _extend(model, state, state.text[rows, state.filled][:, None], active, 1)
    logits = model.logits(x).rearrange((BATCH, POSITION, "vocab")).array[:, 0, :vocab_size]
    token = choose(logits, state.sampling, state.length)
    text = state.text.at[rows, jnp.where(active, state.length, state.text.shape[1])].set(token, mode="drop")
    length = state.length + active
    stopped = active & jnp.isin(token, jnp.asarray(stop_tokens, jnp.int32))
    limit = jnp.where(stopped, length, state.limit)
    return _replace(state, text=text, length=length, filled=state.filled + active, limit=limit, memory=memory)


def _active(state: State):
    return (state.filled == state.length - 1) & (state.length < state.limit)


def _replace(state: State, **fields) -> State:
    return State(**{**vars(state), **fields})


# The jitted functions take and give flat lists of arrays: flattening a model with all its named arrays in Python takes
# longer than a step of a small one.


@dataclass(frozen=True)
class _Kind:
    """What a pytree is besides its arrays. Compared by identity first, hashed once: both happen at each step."""

    structure: Any
    rest: tuple

    def join(self, arrays) -> Any:
        arrays = iter(arrays)
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in self.rest]
        return jax.tree.unflatten(self.structure, leaves)

    @cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.rest))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return self is other or (
            isinstance(other, _Kind) and self.rest == other.rest and self.structure == other.structure
        )


_ARRAY = "array"  # marks the place of an array


def _flat(tree) -> tuple[list, _Kind]:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves if _is_array(leaf)]
    return arrays, _Kind(structure, tuple(_ARRAY if _is_array(leaf) else leaf for leaf in leaves))


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


@partial(jax.jit, static_argnames=("options", "kinds"), donate_argnums=1)
def _decode(model, state, steps, options, *, kinds):
    model, start = kinds[0].join(model), kinds[1].join(state)

    def going_on(carry):
        done, state = carry
        return (done < steps) & jnp.any(_active(state))

    _, state = jax.lax.while_loop(going_on, lambda c: (c[0] + 1, _decode_one(model, c[1], *options)), (0, start))
    last = jnp.take_along_axis(state.text, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]
    return jax.tree.leaves(state), (last, state.length, state.limit)


@partial(jax.jit, static_argnames=("chunk", "kinds"), donate_argnums=1)
def _prefill_all(model, state, chunk, *, kinds):
    model, start = kinds[0].join(model), kinds[1].join(state)
    unread = lambda state: jnp.any(state.filled < state.length - 1)  # noqa: E731
    return jax.tree.leaves(jax.lax.while_loop(unread, lambda state: _prefill(model, state, chunk), start))


@partial(jax.jit, static_argnames=("chunk", "slots", "kinds"), donate_argnums=1)
def _prefill_slot(model, state, slot, chunk, slots, *, kinds):
    model = kinds[0].join(model)
    one = [_rows(a, slot, slots) for a in state]
    after = jax.tree.leaves(_prefill(model, kinds[1].join(one), chunk))
    return [_put_rows(a, b, slot) for a, b in zip(state, after, strict=True)]


@partial(jax.jit, static_argnames=("kind",), donate_argnums=0)
def _admit(arrays, slot, row, *, kind):
    state: State = kind.join(arrays)
    text, length, limit, sampling, control = row
    slots = state.length.shape[0]
    memory = jax.tree.map(lambda a: _put_rows(a, jnp.zeros_like(_rows(a, slot, slots)), slot), state.memory)
    if control is not None:
        control = hax.named(state.control.array.at[slot].set(control), state.control.axes)
    return jax.tree.leaves(
        State(
            state.text.at[slot].set(text),
            state.length.at[slot].set(length),
            state.filled.at[slot].set(0),
            state.limit.at[slot].set(limit),
            jax.tree.map(lambda a, b: a.at[slot].set(b[0]), state.sampling, sampling),
            control,
            memory,
        )
    )


@partial(jax.jit, static_argnames=("kind",), donate_argnums=0)
def _cancel(arrays, slot, *, kind):
    state: State = kind.join(arrays)
    return jax.tree.leaves(_replace(state, limit=state.limit.at[slot].set(0)))


def _rows(array, slot, slots: int):
    """What belongs to a slot: an equal share of the first axis, which may hold several rows for each (heads)."""
    rows = array.shape[0] // slots
    return jax.lax.dynamic_slice_in_dim(array, slot * rows, rows)


def _put_rows(array, rows, slot):
    return jax.lax.dynamic_update_slice_in_dim(array, rows, slot * rows.shape[0], 0)
