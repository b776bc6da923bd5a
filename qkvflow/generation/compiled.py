"""The compiled steps of generation, on flat lists of arrays. States that a step replaces are donated."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp

from qkvflow.generation import drafting
from qkvflow.generation import state as states
from qkvflow.generation.logprobs import Logprobs, in_blocks
from qkvflow.generation.state import State


@partial(jax.jit, static_argnames=("options", "kinds"), donate_argnums=1)
def decode(model, state, steps, options, *, kinds):
    """Runs up to `steps` decoding steps: (state, (last token, length, limit), what the last step added)."""
    model, start = kinds[0].join(model), kinds[1].join(state)
    add = drafting.add_tokens if isinstance(model, drafting.DraftedModel) else states.add_token
    shape = jax.eval_shape(lambda: add(model, start, *options)[1])
    none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)

    def going_on(carry):
        done, state, _ = carry
        return (done < steps) & jnp.any(state.active)

    def step(carry):
        return carry[0] + 1, *add(model, carry[1], *options)

    _, state, told = jax.lax.while_loop(going_on, step, (0, start, none))
    last = jnp.take_along_axis(state.text, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]
    return jax.tree.leaves(state), (last, state.length, state.limit), told


@partial(jax.jit, static_argnames=("chunk", "kinds"), donate_argnums=1)
def prefill_all(model, state, chunk, *, kinds):
    """Reads all prompts to the end."""
    model, start = kinds[0].join(model), kinds[1].join(state)
    piece = lambda state: states.prefill(model, state, chunk)[1]  # noqa: E731
    return jax.tree.leaves(jax.lax.while_loop(lambda state: jnp.any(state.unread > 0), piece, start))


@partial(jax.jit, static_argnames=("chunk", "kinds"), donate_argnums=1)
def prefill(model, state, chunk, *, kinds):
    """Reads a piece of each prompt: (state, the model's activations there [batch, chunk, embed])."""
    x, state = states.prefill(kinds[0].join(model), kinds[1].join(state), chunk)
    return jax.tree.leaves(state), x


@partial(jax.jit, static_argnames=("kind", "vocab_size"))
def score(model, x, tokens, *, kind, vocab_size) -> Logprobs:
    """Log-probabilities of the tokens [position] that follow the positions of x [1, position, embed]."""
    model = kind.join(model)
    return in_blocks(lambda x: states.logits_at(model, x[None])[0, :, :vocab_size], x[0], tokens)


def _admit(arrays, row, content, *, kind):
    """Puts an unread text into a row, replacing what was there."""
    state: State = kind.join(arrays)
    text, length, limit, chosen, control = content
    rows = state.length.shape[0]
    memory = jax.tree.map(lambda a: _put(a, jnp.zeros_like(_take(a, row, rows)), row), state.memory)
    if control is not None:
        control = hax.named(state.control.array.at[row].set(control), state.control.axes)
    return jax.tree.leaves(
        State(
            state.text.at[row].set(text),
            state.length.at[row].set(length),
            state.filled.at[row].set(0),
            state.limit.at[row].set(limit),
            *jax.tree.map(lambda a, b: a.at[row].set(b[0]), (state.sampling, state.bias), chosen),
            control,
            memory,
        )
    )


admit = jax.jit(_admit, static_argnames="kind", donate_argnums=0)
begin = jax.jit(_admit, static_argnames="kind")  # the same, for an empty state that is kept


@partial(jax.jit, static_argnames=("kind",), donate_argnums=0)
def end(arrays, row, *, kind):
    """Ends the text of a row at its current length."""
    state: State = kind.join(arrays)
    return jax.tree.leaves(state.replace(limit=state.limit.at[row].set(0)))


@partial(jax.jit, donate_argnums=0)
def put(arrays, text, row):
    """Copies a text, given as a state of one row, into a row."""
    return [_put(a, b, row) for a, b in zip(arrays, text, strict=True)]


@partial(jax.jit, static_argnames=("rows",))
def take(arrays, row, *, rows):
    """The text of a row, as a state of one row."""
    return [_take(a, row, rows) for a in arrays]


@partial(jax.jit, static_argnames=("rows", "kind"))
def regroup(arrays, picks, *, rows, kind):
    """A state whose rows are the rows `picks` of this one; -1 for an empty row."""
    # One copy per row: a gather would look up the row for every single number.
    picked = [jnp.concatenate([_take(a, jnp.maximum(row, 0), rows) for row in picks]) for a in arrays]
    state: State = kind.join(picked)
    return jax.tree.leaves(state.replace(limit=jnp.where(picks < 0, 0, state.limit)))


def _take(array, row, rows: int):
    """The part of an array that belongs to a row: an equal share of the first axis, which may have several entries per
    row (heads)."""
    share = array.shape[0] // rows
    return jax.lax.dynamic_slice_in_dim(array, row * share, share)


def _put(array, rows, row):
    return jax.lax.dynamic_update_slice_in_dim(array, rows, row * rows.shape[0], 0)
