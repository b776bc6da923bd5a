"""`qkvflow.generate`: continues a batch of token sequences."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.axes import BATCH, CONTROL, POSITION
from qkvflow.errors import UserError
from qkvflow.generation.drafting import Drafted, Drafting
from qkvflow.generation.prepare import PreparedModel, check_length
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.models.exits import ExitConfig, Exited
from qkvflow.models.shared_cache import CacheSharing


def generate(
    model: LmHeadModel,
    tokens: NamedArray,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    *,
    lengths: Sequence[int] | NamedArray | None = None,
    control: NamedArray | None = None,
    stop_token: int | None = None,
    dtype: str | None = None,
    draft_steps: int | None = None,
    draft_tokens: int | None = None,
    exit: ExitConfig | Mapping[str, object] | None = None,
    cache: str | None = None,
    report: Callable[[Drafted | Exited], object] | None = None,
) -> NamedArray:
    """Continues each sequence of `tokens` by up to `max_new_tokens` tokens.

    Args:
        model: of qkvflow or Levanter. W(t) is evaluated once, before the first token.
        tokens: {batch, position} or {position}, int; the prompts.
        temperature, top_k, top_p: how tokens are chosen, see `qkvflow.generation.sampling`; 0 is greedy.
        seed: sequence i of the batch uses seed + i, so that it can be reproduced on its own.
        use_cache: False recomputes the whole text for each token: the same tokens, far slower.
        lengths: [batch], for prompts of different lengths: the number of prompt tokens in each row; the rest of the row
            is not read. Each text continues directly after its prompt.
        control: {batch, control} or {control}, constant along the text; with an axis `position` it may vary, and is 0
            after its end. None is zero control.
        stop_token: a text ends when it generates this token.
        dtype: `f32` or `bf16`: the precision of the computation; by default that of the weights.
        draft_steps: the same flow on a grid of this many steps drafts `draft_tokens` tokens (4 by default), which one
            pass of the full grid checks: greedy results stay the same, sampled tokens have the same distribution.
        exit: `{"rule": "kl", "threshold": 0.01}`: a token stops integrating when the rule says so, see
            `qkvflow.models.exits`.
        cache: `latest` or `every N`: only some evaluations keep keys and values, see `qkvflow.models.shared_cache`; all
            by default.
        report: called at the end with the counts of drafting and of exits.

    Returns:
        {batch, position = that of `tokens` + max_new_tokens}, prompts included; after the end of a text `stop_token`
        is repeated, or 0 if there is none.

    Raises:
        UserError: prompt and new tokens exceed `model.max_seq_len`; adaptive steps; `draft_steps` that are not below
            the model's number of steps; an option that is wrong.
    """
    Pos = tokens.resolve_axis(POSITION)
    others = [a for a in tokens.axes if a.name != POSITION]
    if [a.name for a in others] not in ([], [BATCH]):
        raise UserError(f"tokens must have the axes batch and position, or position alone; got {tokens.axes}.")
    Batch = others[0] if others else Axis(BATCH, 1)
    rows = np.asarray(tokens.rearrange((..., POSITION)).array).reshape(Batch.size, Pos.size)
    if not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"tokens must be whole numbers, got {rows.dtype}.")
    vocab = model.Vocab.size
    counts = _lengths(lengths, Batch.size, Pos.size)
    prompts = [row[:n] for row, n in zip(rows, counts, strict=True)]
    for i, prompt in enumerate(prompts):
        if len(prompt) and not 0 <= prompt.min() <= prompt.max() < vocab:
            raise UserError(
                f"tokens of sequence {i} range from {prompt.min()} to {prompt.max()}, but the vocabulary has only"
                f" {vocab}."
            )
    first = SamplingOptions(temperature, top_k, top_p, seed)
    options = [dataclasses.replace(first, seed=int(seed) + i) for i in range(Batch.size)]

    drafting = Drafting.of(draft_steps, draft_tokens)
    exits = None if exit is None else ExitConfig.of(exit)
    if report is not None and drafting is None and exits is None:
        raise UserError(
            "report receives the statistics of drafting and exits: pass draft_steps or exit, or leave it out."
        )
    for i, n in enumerate(counts):
        what = f"the prompt of sequence {i}" if Batch.size > 1 else "the prompt"
        check_length(model.Pos.size, n, max_new_tokens, what)
    prepared = PreparedModel(model, use_cache, dtype, drafting, exits, CacheSharing.of(cache))
    controls = _controls(prepared, control, Batch)
    length = max(counts) + max_new_tokens
    engine = prepared.engine(Batch.size, length, () if stop_token is None else (stop_token,))
    for i, prompt in enumerate(prompts):
        engine.admit(i, prompt, max_new_tokens, options[i], controls[i])
    engine.prefill_all(max(counts) - 1)
    step = engine.decode(max_new_tokens)
    text, ends, _ = engine.read()
    if report is not None:
        if drafting is not None:
            report(sum(step.drafted, Drafted()))
        if exits is not None:  # with a threshold of 0, nothing counts: every token that was read made all steps
            read = int(ends.sum()) - Batch.size
            report(engine.exited() or Exited(prepared.steps * read, read, prepared.steps))

    end = Pos.size + max_new_tokens
    text = np.pad(text[:, :end], ((0, 0), (0, max(0, end - text.shape[1]))))
    text = np.where(np.arange(end) < ends[:, None], text, 0 if stop_token is None else stop_token)
    dtype = tokens.dtype if tokens.dtype.itemsize >= 4 else jnp.int32  # narrower ones may not hold every token
    named = hax.named(jnp.asarray(text, dtype), (Batch, Pos.resize(end)))
    return named if others else named[BATCH, 0]


def _lengths(lengths, batch: int, longest: int) -> list[int]:
    if lengths is None:
        return [longest] * batch
    array = np.asarray(lengths.array if isinstance(lengths, NamedArray) else lengths)
    if array.shape != (batch,) or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"lengths must be one whole number for each of the {batch} sequences, got {lengths!r:.80}.")
    if array.min() < 1 or array.max() > longest:
        raise UserError(f"lengths must lie between 1 and {longest}, the positions of `tokens`; got {array.tolist()}.")
    return array.tolist()


def _controls(prepared: PreparedModel, control: NamedArray | None, Batch: Axis) -> list[np.ndarray | None]:
    if control is None:
        return [None] * Batch.size
    prepared.check_control([0.0] * (prepared.control_dim or 0))  # rejects a model without control
    names = {a.name for a in control.axes}
    if CONTROL not in names or not names <= {BATCH, POSITION, CONTROL}:
        raise UserError(f"The control needs the axis control, and may have batch and position; got {control.axes}.")
    if BATCH in names and control.resolve_axis(BATCH) != Batch:
        raise UserError(f"The control is for {control.axis_size(BATCH)} sequences, but there are {Batch.size}.")
    control = control.broadcast_axis(Batch).rearrange((BATCH, ..., CONTROL))
    if jnp.issubdtype(control.dtype, jnp.floating):  # NumPy does not know bf16
        control = control.astype(jnp.float32)
    return [prepared.check_control(row) for row in np.asarray(jax.device_get(control.array))]
