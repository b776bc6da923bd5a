"""The state of a batch of texts during generation, and its two operations: reading prompts and adding tokens.

Each text has a row. The model's memory holds all its tokens except the last; a decoding step reads the last token and
writes the next. A state of one row is a single text, and rows are copied between states: the leading axis of all arrays
is that of the rows, or an equal number of heads per row.
"""

from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Bool, Int

from qkvflow.axes import BATCH, CONTROL, EMBED, POSITION
from qkvflow.blocks import Inputs, Window
from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.sampling import Bias, Sampling, SamplingOptions, choose
from qkvflow.models.exits import with_limits


class State(eqx.Module):
    """The contents of a batch of rows.

    Attributes:
        text: {batch, position}, with `length` tokens each.
        filled: number of these tokens in the memory.
        limit: the length at which a text is complete; 0 for an empty row.
    """

    text: Int[Array, "batch position"]
    length: Int[Array, "batch"]
    filled: Int[Array, "batch"]
    limit: Int[Array, "batch"]
    sampling: Sampling
    bias: Bias
    control: NamedArray | None  # {batch, position, control}
    memory: Any

    @staticmethod
    def empty(model, rows: int, length: int, room: int, control_dim: int | None) -> "State":
        """Rows for texts of `length` tokens.

        Args:
            room: positions in the memory.
        """
        Batch, Pos = Axis(BATCH, rows), Axis(POSITION, length)
        control = None if control_dim is None else hax.zeros((Batch, Pos, Axis(CONTROL, control_dim)))
        neutral = [SamplingOptions()] * rows
        sampling, bias = jax.tree.map(jnp.asarray, (Sampling.of(neutral), Bias.of(neutral)))
        text, counts = jnp.zeros((rows, length), jnp.int32), [jnp.zeros(rows, jnp.int32) for _ in range(3)]
        return State(text, *counts, sampling, bias, control, model.memory(Batch, room))

    @property
    def active(self) -> Bool[Array, "batch"]:
        """The rows that a decoding step continues: prompt read, text not complete."""
        return (self.filled == self.length - 1) & (self.length < self.limit)

    @property
    def unread(self) -> Int[Array, "batch"]:
        """The number of tokens to read before the text can be continued."""
        return jnp.maximum(self.length - 1 - self.filled, 0)

    def replace(self, **fields) -> "State":
        """A copy with other fields."""
        return State(**{**vars(self), **fields})


class Added(NamedTuple):
    """The tokens that a decoding step added to each row: the first `count` of `tokens`.

    Attributes:
        logprobs: of the tokens; zeros if no row requested them.
        drafted: {batch, 4}, see `qkvflow.generation.drafting`; None without drafting.
    """

    tokens: Int[Array, "batch width"]
    count: Int[Array, "batch"]
    logprobs: Logprobs
    drafted: Int[Array, "batch 4"] | None


def prefill(model, state: State, chunk: int) -> tuple[Array, State]:
    """Reads up to `chunk` unread tokens of each row: the model's activations there [batch, chunk, embed], the state."""
    count = jnp.minimum(state.unread, chunk)
    padded = jnp.pad(state.text, ((0, 0), (0, chunk)))
    tokens = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, chunk))(padded, state.filled)
    x, memory = extend(model, state, tokens, count, state.memory, state.filled)
    return x, state.replace(filled=state.filled + count, memory=memory)


def add_token(model, state: State, stop_tokens: tuple[int, ...], vocab_size: int | None) -> tuple[State, Added]:
    """Adds a token to every active row."""
    rows, active = jnp.arange(state.text.shape[0]), state.active
    x, memory = extend(model, state, state.text[rows, state.filled][:, None], active, state.memory, state.filled)
    logits = logits_at(model, x)[:, 0, :vocab_size]
    token = choose(state.bias.add(logits, active), state.sampling, state.length, active)
    told = jax.lax.cond(
        jnp.any(active & state.sampling.logprobs),
        lambda: Logprobs.of(logits, token),
        lambda: Logprobs.none(*logits.shape),
    )
    text = state.text.at[rows, jnp.where(active, state.length, state.text.shape[1])].set(token, mode="drop")
    length = state.length + active
    stopped = active & jnp.isin(token, jnp.asarray(stop_tokens, jnp.int32))
    limit = jnp.where(stopped, length, state.limit)
    state = state.replace(text=text, length=length, filled=state.filled + active, limit=limit, memory=memory)
    return state, Added(token[:, None], active.astype(jnp.int32), jax.tree.map(lambda a: a[:, None], told), None)


def logits_at(model, x: Array) -> Array:
    """[batch, position, embed] -> [batch, position, vocab]."""
    return model.logits(hax.named(x, (BATCH, POSITION, EMBED))).rearrange((BATCH, POSITION, "vocab")).array


def extend(
    model, state: State, tokens: Int[Array, "batch new"], count, memory, start: Int[Array, "batch"], trial: bool = False
) -> tuple[Array, Any]:
    """Runs the model at new positions from `start` on, of which `count` [batch] are real: (x, memory).

    The only place where generation calls the model.

    Args:
        trial: as in `Window`.
    """
    Batch, New = (Axis(name, size) for name, size in zip((BATCH, POSITION), tokens.shape, strict=True))
    window = Window(hax.named(start, Batch), hax.named(count.astype(jnp.int32), Batch), trial)
    control = None
    if state.control is not None:
        at = jnp.minimum(start[:, None] + jnp.arange(New.size)[None], state.text.shape[1] - 1)
        rows = jnp.take_along_axis(state.control.array, at[..., None], axis=1)
        control = hax.named(rows, (Batch, New, state.control.axes[-1]))
    inputs = Inputs(control=control, window=window)
    model = with_limits(model, state.sampling.exit_threshold, state.sampling.exit_min_steps)
    x, memory = model.extend(hax.named(tokens, (Batch, New)), inputs, memory)
    return x.rearrange((BATCH, POSITION, EMBED)).array, memory
