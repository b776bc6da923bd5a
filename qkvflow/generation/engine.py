"""The engine of generation: texts in slots, continued together by compiled steps whose memory is donated.

Slots are filled and freed independently, so texts of any length share a batch. There are two ways to add texts:
`admit` and `prefill_all` read many prompts together; `begin` and `prefill` read one prompt on its own, piece by piece,
and `insert` adds it to the batch. `take` removes a text, which can be inserted again later with identical results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from qkvflow.generation import compiled
from qkvflow.generation.drafting import Drafted, DraftMemory
from qkvflow.generation.flat import flat, kind_of
from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.rows import Rows
from qkvflow.generation.sampling import Bias, Sampling, SamplingOptions
from qkvflow.generation.state import State
from qkvflow.models.exits import Exited, ExitMemory

CHUNKS = (16, 64, 256)  # numbers of prompt positions read at once; each is compiled once


def chunks_of(length: int) -> list[int]:
    """The numbers of prompt positions read at once where texts have `length` tokens."""
    return [chunk for chunk in CHUNKS if chunk <= length] or [CHUNKS[0]]


def room_for(length: int) -> int:
    """Positions in the memory of a text of `length` tokens: whole chunks."""
    largest = chunks_of(length)[-1]
    return -(-length // largest) * largest


@dataclass
class Text:
    """A text outside the batch.

    Attributes:
        unread: number of its tokens to read before it can be continued.
    """

    arrays: list
    unread: int

    @property
    def is_parked(self) -> bool:
        """Whether it is in host memory."""
        return isinstance(self.arrays[0], np.ndarray)

    def park(self) -> None:
        """Moves it to host memory until it is used again."""
        self.arrays = jax.device_get(self.arrays)


@dataclass(frozen=True)
class Step:
    """The result of decoding: for each slot its last token, its length, and whether it is complete.

    Attributes:
        tokens: [slot, width]; the step added the first `count` [slot] (the last step, if there were several).
        logprobs: of these tokens, if any text requested them.
        drafted: counts for the whole text in each slot; empty if the engine does not draft.
    """

    token: np.ndarray
    length: np.ndarray
    complete: np.ndarray
    tokens: np.ndarray
    count: np.ndarray
    logprobs: Logprobs | None
    drafted: Sequence[Drafted] = ()

    def added(self, slot: int) -> Iterator[tuple[int, bool, tuple[int, int]]]:
        """(token, whether it ends the text, its index in `logprobs`) for all tokens added to the slot."""
        count = int(self.count[slot])
        for i in range(count):
            yield int(self.tokens[slot, i]), bool(self.complete[slot]) and i == count - 1, (slot, i)


class Engine:
    """Generates in `slots` slots with room for `length` tokens each.

    model: a `CachedModel`, `DraftedModel` or `RecomputedModel`.
    stop_tokens: any of these completes a text; it is part of the text.
    vocab_size: tokens from this one on are never chosen (a model may have more tokens than its tokenizer).
    control_dim: components of the model's control; None for a model without control.
    elastic: compute only about as many rows as there are texts (see `qkvflow.generation.rows`).
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
        elastic: bool = False,
    ):
        self.slots, self.length = slots, length
        self._chunks = chunks_of(length)
        self._control_dim = control_dim
        self._options = (tuple(stop_tokens), vocab_size)
        self._rows = Rows(slots, elastic)
        room = room_for(length)

        def empty(rows: int) -> State:
            return State.empty(model, rows, length, room, control_dim)

        self._empty = empty
        arrays, self._model_kind = flat(model)
        self._kinds = {rows: kind_of(lambda rows=rows: empty(rows)) for rows in {1, *self._rows.sizes}}
        self.rows = self._rows.size  # number of rows that a step computes
        self._model, self._sharding = _placed(arrays)
        self._state = jax.device_put(jax.tree.leaves(empty(self.rows)), self._sharding)
        self._wants_logprobs: set[int] = set()
        self._running: set[int] = set()  # slots of texts that are read and not complete

    @property
    def compile_lengths(self) -> list[int]:
        """Prompt lengths that together use each of the compiled prefill steps."""
        return [min(chunk + 1, self.length - 1) for chunk in self._chunks]

    def admit(
        self,
        slot: int,
        tokens: Sequence[int],
        max_new_tokens: int,
        options: SamplingOptions,
        control: np.ndarray | None = None,
    ) -> None:
        """Puts a prompt into a slot, replacing what was there; `prefill_all` reads it.

        While other texts are being continued it is read here, on its own: a step that reads many prompts writes whole
        chunks behind all texts, and near the end of their room over them.

        Args:
            control: [control], or [position, control] with one row per position of the future text.
        """
        self._running.discard(slot)
        if self._running:
            text = self.begin(tokens, max_new_tokens, options, control)
            while text.unread:
                self.prefill(text)
            self.insert(slot, text, options.logprobs)
            return
        content = self._content(tokens, max_new_tokens, options, control)
        row = self._place(slot, options.logprobs)
        self._state = compiled.admit(self._state, np.int32(row), content, kind=self._kind)

    def prefill_all(self, remaining: int) -> None:
        """Reads all admitted prompts that `admit` has not read; the longest has `remaining` unread tokens."""
        if remaining > 0 and not self._running:
            self._state = compiled.prefill_all(self._model, self._state, self._chunk(remaining), kinds=self._both)

    def begin(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        options: SamplingOptions,
        control: np.ndarray | None = None,
    ) -> Text:
        """An unread text outside the batch.

        Args:
            control: as for `admit`.
        """
        content = self._content(tokens, max_new_tokens, options, control)
        arrays = compiled.begin(self._blank, np.int32(0), content, kind=self._kinds[1])
        return Text(arrays, len(tokens) - 1)

    def prefill(self, text: Text, next_tokens: Sequence[int] | None = None) -> Logprobs | None:
        """Reads a piece of a text's prompt.

        Args:
            next_tokens: the tokens that follow the unread ones (for an unread prompt, the prompt from its second token
                on).

        Returns:
            their log-probabilities for the positions read.
        """
        chunk, count = self._chunk(text.unread), text.unread
        self._bring(text)
        text.arrays, x = compiled.prefill(self._model, text.arrays, chunk, kinds=(self._model_kind, self._kinds[1]))
        text.unread -= min(chunk, count)
        if next_tokens is None:
            return None
        targets = np.zeros(chunk, np.int32)
        given = next_tokens[: min(chunk, count)]
        targets[: len(given)] = given
        told = compiled.score(self._model, x, targets, kind=self._model_kind, vocab_size=self._options[1])
        return Logprobs(*(a[: len(given)] for a in jax.device_get(told)))

    def insert(self, slot: int, text: Text, logprobs: bool = False) -> None:
        """Puts a text with a fully read prompt into a slot. The same text can be inserted into other slots too.

        Args:
            logprobs: as in its options.
        """
        row = self._place(slot, logprobs)
        self._running.add(slot)
        self._bring(text)
        self._state = compiled.put(self._state, text.arrays, np.int32(row))

    def take(self, slot: int) -> Text:
        """Removes the text from a slot and returns it."""
        row = self._rows.row(slot)
        assert row is not None
        text = Text(compiled.take(self._state, np.int32(row), rows=self.rows), 0)
        self.cancel(slot)
        return text

    def cancel(self, slot: int) -> None:
        """Ends the text in a slot at its current length. Harmless if the slot is empty."""
        row = self._rows.free(slot)
        self._wants_logprobs.discard(slot)
        self._running.discard(slot)
        if row is not None:
            self._state = compiled.end(self._state, np.int32(row), kind=self._kind)

    def decode(self, steps: int = 1) -> Step:
        """Adds up to `steps` tokens (or the tokens of as many full passes) to every text that is read and not complete,
        and waits for the result."""
        out = compiled.decode(self._model, self._state, np.int32(steps), self._options, kinds=self._both)
        self._state, newest, added = out
        # All data that every step needs, in one transfer.
        token, length, limit, tokens, count = self._by_slot(jax.device_get((*newest, added.tokens, added.count)))
        logprobs = Logprobs(*self._by_slot(jax.device_get(added.logprobs))) if self._wants_logprobs else None
        self._running = set(np.flatnonzero(length < limit).tolist())
        drafted = () if added.drafted is None else [Drafted(*row) for row in self._by_slot([added.drafted])[0].tolist()]
        picks = self._rows.after_step()
        if picks is not None:
            self._regroup(picks)
        return Step(token, length, length >= limit, tokens, count, logprobs, drafted)

    def exited(self) -> Exited | None:
        """Exit counts of the texts that are in the rows or were last, prompts included; None without exits."""
        state: State = self._kind.join(self._state)
        full = state.memory.full if isinstance(state.memory, DraftMemory) else state.memory
        if not isinstance(full, tuple) or len(full) < 2 or not isinstance(full[1], ExitMemory):
            return None
        steps, tokens = np.asarray(jax.device_get(full[1].spent)).sum(axis=0).tolist()
        return Exited(steps, tokens, full[1].of)

    def wait(self) -> None:
        """Waits for all steps so far, for timing."""
        jax.block_until_ready(self._state)

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(text [slot, position], length [slot], complete [slot] bool)."""
        state: State = self._kind.join(self._state)
        text, length, limit = self._by_slot(jax.device_get((state.text, state.length, state.limit)))
        return text, length, length >= limit

    @cached_property
    def _blank(self) -> list:
        return jax.device_put(jax.tree.leaves(self._empty(1)), self._sharding)

    @property
    def _kind(self):
        return self._kinds[self.rows]

    @property
    def _both(self):
        return self._model_kind, self._kind

    def _chunk(self, remaining: int) -> int:
        return next((c for c in self._chunks if c >= remaining), self._chunks[-1])

    def _content(self, tokens: Sequence[int], max_new_tokens: int, options: SamplingOptions, control) -> tuple:
        text = np.zeros(self.length, np.int32)
        text[: len(tokens)] = tokens
        given = None
        if self._control_dim is not None:
            given = np.zeros((self.length, self._control_dim), np.float32)
            if control is not None:
                rows = control[: self.length] if control.ndim == 2 else [control] * self.length
                given[: len(rows)] = rows
        limit = min(len(tokens) + max_new_tokens, self.length)
        return text, len(tokens), limit, (Sampling.of([options]), Bias.of([options])), given

    def _bring(self, text: Text) -> None:
        """Moves a text to where the steps expect it, to avoid recompilation."""
        if text.is_parked:
            text.arrays = jax.device_put(text.arrays, self._sharding)

    def _place(self, slot: int, logprobs: bool) -> int:
        row, picks = self._rows.place(slot)
        if picks is not None:
            self._regroup(picks)
        (self._wants_logprobs.add if logprobs else self._wants_logprobs.discard)(slot)
        return row

    def _regroup(self, picks: list[int]) -> None:
        before, self.rows = self.rows, len(picks)
        self._state = compiled.regroup(self._state, np.asarray(picks, np.int32), rows=before, kind=self._kind)

    def _by_slot(self, arrays) -> list[np.ndarray]:
        """Arrays with a leading axis of rows, reordered by slot; zeros for empty slots."""
        occupied = self._rows.occupied
        slots, rows = [s for s, _ in occupied], [r for _, r in occupied]
        found = []
        for array in map(np.asarray, arrays):
            whole = np.zeros((self.slots, *array.shape[1:]), array.dtype)
            whole[slots] = array[rows]
            found.append(whole)
        return found


def _placed(model: list) -> tuple[list, Sharding]:
    """The model and the sharding of states as the steps return them, so that the second step is not compiled again.

    On one device, or, if the model is sharded over several, on each of them.
    """
    devices = {device for a in model for device in a.devices()}
    if len(devices) == 1:
        sharding = SingleDeviceSharding(*devices)
        return jax.device_put(model, sharding), sharding
    mesh = next(a.sharding for a in model if isinstance(a.sharding, NamedSharding)).mesh
    return model, NamedSharding(mesh, PartitionSpec())
