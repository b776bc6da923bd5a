"""Self-speculative decoding: the same flow on a coarse grid proposes tokens, one pass of the full grid checks them.

    drafts d_1 .. d_k from the coarse grid, one by one;  the full grid processes the last token and d_1 .. d_k in one
    window;  `rejection` determines how many drafts are accepted, and which token follows them

Each grid has its own memory. Memories are truncated with the text: keys after its end are masked, and recurrences
resume from their state at the last accepted token.
"""

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Int

from qkvflow.axes import BATCH
from qkvflow.blocks import Inputs
from qkvflow.blocks.memory import settled, states, with_states
from qkvflow.errors import UserError
from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.rejection import judge, propose
from qkvflow.generation.state import Added, State, extend, logits_at
from qkvflow.models.cached import CachedFlow, CachedModel

MOST = 64  # drafts per pass; a window may extend this far beyond a text
_BEHIND = 2  # tokens that the coarse grid may not have read when it begins: its last draft and the token after it


@dataclass(frozen=True)
class Drafting:
    """How texts are drafted.

    Attributes:
        steps: of the coarse grid.
        tokens: maximum number of drafts per pass of the full grid.
    """

    steps: int
    tokens: int = 4

    @staticmethod
    def of(steps: int | None, tokens: int | None) -> "Drafting | None":
        """From the options `draft_steps` and `draft_tokens`.

        Raises:
            UserError: one of them is no whole number or out of range, or tokens are given without steps.
        """
        for name, given in (("draft_steps", steps), ("draft_tokens", tokens)):
            if given is not None and (isinstance(given, bool) or not isinstance(given, numbers.Integral)):
                raise UserError(f"{name} must be a whole number, got {given!r:.80}.")
        if steps is None:
            if tokens is not None:
                raise UserError(
                    f"draft_tokens is {tokens}, but draft_steps is missing: also give draft_steps, such as 3."
                )
            return None
        drafting = Drafting(int(steps)) if tokens is None else Drafting(int(steps), int(tokens))
        if drafting.steps < 1:
            raise UserError(f"draft_steps must be at least 1, got {drafting.steps}.")
        if not 1 <= drafting.tokens <= MOST:
            raise UserError(f"draft_tokens must lie between 1 and {MOST}, got {drafting.tokens}.")
        return drafting


@dataclass(frozen=True)
class Drafted:
    """Counts of drafting.

    Attributes:
        tokens: generated.
        passes: of the full grid.
        proposed, accepted: drafts.
    """

    tokens: int = 0
    passes: int = 0
    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafted") -> "Drafted":
        return Drafted(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __str__(self) -> str:
        if not self.proposed:
            return "drafting: nothing was drafted"
        return (
            f"drafting: {self.tokens / self.passes:.2f} tokens per full pass,"
            f" {self.accepted / self.proposed:.0%} of {self.proposed} drafts accepted"
        )


class DraftMemory(eqx.Module):
    """The memories of both grids.

    Attributes:
        filled: number of tokens in the coarse memory.
        counts: {batch, 4}, one `Drafted` per text.
    """

    full: Any
    coarse: Any
    filled: Int[Array, "batch"]
    counts: Int[Array, "batch 4"]


class DraftedModel(eqx.Module):
    """A model and the same flow on a coarse grid. Both share all other parts of the model."""

    full: CachedModel
    flow: CachedFlow
    tokens: int = eqx.field(static=True)

    def memory(self, Batch: Axis, length: int) -> DraftMemory:
        """An empty memory for `length` positions per sequence, plus the windows that extend beyond."""
        room = length + MOST
        zeros = jnp.zeros(Batch.size, jnp.int32), jnp.zeros((Batch.size, 4), jnp.int32)
        return DraftMemory(self.full.memory(Batch, room), self.coarse.memory(Batch, room), *zeros)

    def extend(self, tokens: NamedArray, inputs: Inputs, memory: DraftMemory) -> tuple[NamedArray, DraftMemory]:
        """Like `CachedModel.extend`, for a prompt: both grids read it."""
        x, full = self.full.extend(tokens, inputs, memory.full)
        _, coarse = self.coarse.extend(tokens, inputs, memory.coarse)
        start, count = inputs.window.start.array, inputs.window.count.array
        filled = jnp.where(count > 0, start + count, memory.filled)  # the coarse grid may be a token behind
        return x, DraftMemory(full, coarse, filled, memory.counts)

    def logits(self, x: NamedArray) -> NamedArray:
        """Like `CachedModel.logits`."""
        return self.full.logits(x)

    @property
    def coarse(self) -> CachedModel:
        return dataclasses.replace(self.full, flow=self.flow, exit=None)


def add_tokens(
    model: DraftedModel, state: State, stop_tokens: tuple[int, ...], vocab_size: int | None
) -> tuple[State, Added]:
    """Adds 1 to `model.tokens` + 1 tokens to every active row with one pass of the full grid."""
    rows, active, memory = jnp.arange(state.text.shape[0]), state.active, state.memory
    left = jnp.minimum(jnp.minimum(state.sampling.draft_tokens, model.tokens), state.limit - state.length - 1)
    wanted = jnp.where(active, left, 0)
    drafts, log_q, coarse, kept = _draft(model, state, wanted, vocab_size)

    window = jnp.concatenate([state.text[rows, state.filled][:, None], drafts], axis=1)
    real = jnp.where(active, wanted + 1, 0)
    x, full = extend(model.full, state, window, real, memory.full, state.filled, trial=True)
    logits = logits_at(model, x)[..., :vocab_size]
    biased = jax.vmap(state.bias.add, (1, None), 1)(logits, active)
    stay, behind = judge(biased, drafts, log_q, wanted, state.sampling, state.length, active)

    places = jnp.arange(window.shape[1])[None]
    tokens = jnp.where(places < stay[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), behind[:, None])
    stops = jnp.isin(tokens, jnp.asarray(stop_tokens, jnp.int32)) & (places <= stay[:, None]) & active[:, None]
    stopped = jnp.any(stops, axis=1)
    ending = jnp.argmax(stops, axis=1).astype(jnp.int32)
    count = jnp.where(active, jnp.where(stopped, ending, stay) + 1, 0)
    told = jax.lax.cond(
        jnp.any(active & state.sampling.logprobs),
        lambda: Logprobs.of(logits, tokens),
        lambda: Logprobs.none(*logits.shape),
    )

    last = jnp.maximum(count - 1, 0)
    at = jnp.where(places < count[:, None], state.length[:, None] + places, state.text.shape[1])
    length = state.length + count
    # The coarse grid has read all drafts except the last one.
    read = jnp.minimum(last, jnp.maximum(wanted - 1, 0))
    counts = jnp.stack([count, active.astype(jnp.int32), wanted, jnp.minimum(stay, count)], axis=1)
    after = DraftMemory(
        settled(full, _named(last)),
        with_states(coarse, [hax.named(s.array[read, rows], s.axes[1:]) for s in kept]),
        jnp.where(wanted > 0, state.length + read, memory.filled),
        memory.counts + jnp.where(active[:, None], counts, 0),
    )
    state = state.replace(
        text=state.text.at[rows[:, None], at].set(tokens, mode="drop"),
        length=length,
        filled=state.filled + count,
        limit=jnp.where(stopped, length, state.limit),
        memory=after,
    )
    return state, Added(tokens, count, told, after.counts)


def _draft(model: DraftedModel, state: State, wanted: Int[Array, "batch"], vocab_size: int | None):
    """Drafts [batch, drafts], their log q, the coarse memory, and its states after each draft {drafts, batch, ...}."""
    coarse, filled = model.coarse, state.memory.filled

    def chosen(x, place, at):
        """The draft from the model's output at a place of its window."""
        x = jnp.take_along_axis(x, place[:, None, None], axis=1)
        logits = state.bias.add(logits_at(model, x)[:, 0, :vocab_size], wanted > at)
        return propose(logits, state.sampling, state.length + at, wanted > at)

    def put(all, one, at):
        return jax.lax.dynamic_update_index_in_dim(all, one, at, 1)

    padded = jnp.pad(state.text, ((0, 0), (0, _BEHIND)))
    unread = jnp.take_along_axis(padded, filled[:, None] + jnp.arange(_BEHIND)[None], axis=1)
    count = jnp.where(wanted > 0, state.length - filled, 0)
    x, memory = extend(coarse, state, unread, count, state.memory.coarse, filled)
    token, log_q = chosen(x, jnp.maximum(count - 1, 0), 0)
    drafts = jnp.zeros((len(token), model.tokens), jnp.int32).at[:, 0].set(token)
    all_q = jnp.zeros((len(token), model.tokens, log_q.shape[-1]), log_q.dtype).at[:, 0].set(log_q)
    Drafts = Axis("drafts", model.tokens)
    kept = [s.broadcast_axis(Drafts).rearrange((Drafts, *s.axes)) for s in states(memory)]

    def going_on(carry):
        return jnp.any(wanted > carry[0])

    def more(carry):
        at, drafts, all_q, memory, kept = carry
        before = jax.lax.dynamic_slice_in_dim(drafts, at - 1, 1, axis=1)
        x, memory = extend(coarse, state, before, wanted > at, memory, state.length + at - 1)
        token, log_q = chosen(x, jnp.zeros_like(wanted), at)
        kept = [
            hax.named(all.array.at[at].set(one.array), all.axes) for all, one in zip(kept, states(memory), strict=True)
        ]
        return at + 1, put(drafts, token, at), put(all_q, log_q, at), memory, kept

    _, *found = jax.lax.while_loop(going_on, more, (1, drafts, all_q, memory, kept))
    return found


def _named(array) -> NamedArray:
    return hax.named(array, Axis(BATCH, len(array)))
