"""The prediction if the flow ended early: the head on x_0, ..., x_L, or on translated states."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.axes import EMBED, LAYERS, POSITION
from qkvflow.blocks import Inputs
from qkvflow.errors import UserError
from qkvflow.lens.paths import states
from qkvflow.lens.probe import Edit, Notes, Probe
from qkvflow.lens.run import by_name, opened
from qkvflow.models import NeuralOdeLMHeadModel

TOP = "top"


class LensReading(eqx.Module):
    """
    Attributes:
        loss: of the next token, nats, {layers = L+1, ..., position - 1}.
        kl: KL(p_L || p_k) of the predictions at the end and at layer k, nats, {layers = L+1, ..., position}.
        top_tokens, top_probabilities: the most likely next tokens, {layers = L+1, ..., position, top}.
        rank: number of tokens more likely than the next one, {layers = L+1, ..., position - 1}; 0 is a correct
            prediction.
        entropy: of the prediction, nats, {layers = L+1, ..., position}.
    """

    loss: NamedArray
    kl: NamedArray
    top_tokens: NamedArray
    top_probabilities: NamedArray
    rank: NamedArray
    entropy: NamedArray


class TunedLens(eqx.Module):
    """Translators x_k -> x_k + W_k x_k + b_k for k = 0..L-1, applied before the head; x_L is not translated.

    Source: Belrose et al., Eliciting latent predictions from transformers with the tuned lens (arXiv 2303.08112).
    """

    weight: jax.Array  # [layers, embed, embed], acting on rows
    bias: jax.Array  # [layers, embed]

    def __call__(self, k, x: jax.Array) -> jax.Array:
        """[..., embed] -> the same."""
        return x + x @ self.weight[k] + jnp.broadcast_to(self.bias[k], x.shape)


def logit_lens(
    model: LmHeadModel, tokens: NamedArray, top: int = 5, *, tuned: TunedLens | None = None, **inputs: Any
) -> LensReading:
    """Loss, distance to the end and most likely tokens along t: see `LensReading`. One layer at a time, jit-compatible.

    Args:
        tuned: translators from `tuned_lens`; without them the head is applied to the states directly, though it was
            trained on x_L only: poor predictions from early states do not mean that they hold nothing.
        inputs: as in `lens.run_with_cache`, `edits` included; those after the flow act on the prediction of each layer.

    Raises:
        UserError: top is not in 1..vocab, or `tuned` is of another width or number of steps.
    """
    ours = opened(model)
    steps, width = ours.transformer.flow.plan.steps, ours.Embed.size
    if tuned is not None and tuned.bias.shape != (steps, width):
        raise UserError(
            f"`tuned` translates the states of {tuned.bias.shape[0]} steps with {tuned.bias.shape[1]} components, but"
            f" the model takes {steps} steps with {width}. Train one for it: lens.tuned_lens(model, batches)."
        )
    if not 1 <= top <= ours.Vocab.size:
        raise UserError(f"top must lie in 1..{ours.Vocab.size}, the size of the vocabulary, got {top}.")
    x, batch = _states(ours, tokens, inputs)
    ids, given = tokens.rearrange((*batch, POSITION)).array, _given(ours, **inputs)
    end = _log_p(ours, x[-1], batch, given)

    def at(k, x):
        log_p = _log_p(ours, x if tuned is None else _translated(tuned, k, x), batch, given)
        log_next = jnp.take_along_axis(log_p[..., :-1, :], ids[..., 1:, None], axis=-1)
        rank = jnp.sum(log_p[..., :-1, :] > log_next, axis=-1)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        values, best = jax.lax.top_k(log_p, top)
        return -log_next[..., 0], _kl(end, log_p), best, jnp.exp(values), rank, entropy

    loss, kl, best, probabilities, rank, entropy = jax.lax.map(lambda now: at(*now), (jnp.arange(len(x)), x))
    names = (LAYERS, *batch, POSITION)
    tops = (hax.named(best, (*names, TOP)), hax.named(probabilities, (*names, TOP)))
    return LensReading(
        hax.named(loss, names), hax.named(kl, names), *tops, hax.named(rank, names), hax.named(entropy, names)
    )


def tuned_lens(
    model: LmHeadModel, batches: Sequence[NamedArray], *, epochs: int = 10, learning_rate: float = 1e-3, **inputs: Any
) -> TunedLens:
    """Translators of all layers that bring their predictions close to the final ones: Adam on KL(p_L || p_k), averaged
    over tokens, starting from the identity, so that before any step it equals `logit_lens`.

    Args:
        batches: tokens {..., position} of equal shape; each is a step, `epochs` times. Use different data for analysis.

    Raises:
        UserError: no batches.
    """
    if not batches:
        raise UserError("a tuned lens is trained on text: give at least one batch of tokens.")
    ours = opened(model)
    optimizer = optax.adam(learning_rate)
    steps, width = ours.transformer.flow.plan.steps, ours.Embed.size
    lens = TunedLens(jnp.zeros((steps, width, width)), jnp.zeros((steps, width)))

    @eqx.filter_jit
    def update(model, lens, state, tokens, inputs):
        given = _given(model, **inputs)
        x, batch = _states(model, tokens, inputs)
        end = _log_p(model, x[-1], batch, given)

        def loss(lens):
            def at(now):
                k, x = now
                return jnp.mean(_kl(end, _log_p(model, lens(k, x), batch, given)))

            return jnp.sum(jax.lax.map(jax.checkpoint(at), (jnp.arange(steps), x[:-1])))

        changes, state = optimizer.update(jax.grad(loss)(lens), state)
        return optax.apply_updates(lens, changes), state

    state = optimizer.init(lens)
    for _ in range(epochs):
        for tokens in batches:
            lens, state = update(ours, lens, state, tokens, inputs)
    return lens


def _states(model: NeuralOdeLMHeadModel, tokens: NamedArray, inputs) -> tuple[jax.Array, tuple[str, ...]]:
    """[layers, ..., position, embed], and the names of the axes in between."""
    x = states(model, tokens, **inputs).rearrange((LAYERS, ..., POSITION, EMBED))
    return x.array, x.axis_names[1:-2]


def _given(model: NeuralOdeLMHeadModel, *, edits: Mapping[str, Edit] | None = None, **inputs: Any) -> Inputs:
    """For what comes after the flow."""
    probe = Probe(Notes(frozenset(), by_name(model, edits))) if edits else None
    return Inputs.of(**inputs, probe=probe)


def _translated(lens: TunedLens, k, x: jax.Array) -> jax.Array:
    last = len(lens.bias)
    return jnp.where(k < last, lens(jnp.minimum(k, last - 1), x), x).astype(x.dtype)


def _log_p(model: NeuralOdeLMHeadModel, x: jax.Array, batch: tuple[str, ...], inputs: Inputs) -> jax.Array:
    """[..., position, vocab], fp32: the prediction if x is the end of the flow, after coda and norm."""
    transformer, state = model.transformer, hax.named(x, (*batch, POSITION, EMBED))
    state = state if transformer.coda is None else transformer.coda(state, inputs.within("coda"))
    logits = hax.dot(inputs.see("norm", transformer.norm(state)), model.get_lm_head(), axis=EMBED)
    logits = inputs.see("logits", logits)
    return jax.nn.log_softmax(logits.rearrange((*batch, POSITION, model.Vocab)).array.astype(jnp.float32), axis=-1)


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
