"""What a random control does to a model that never was given one, trained and untrained.

The seed took a nonzero difference of logits as a sign that control works. But its model never saw a control in
training: the matrix C that a control passes through is as it was drawn, for its gradient is zero without one. So the
difference shows that C is not zero, and an untrained model shows it too. A control that means something must be trained
with: see experiments.steering.
"""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from experiments.gradient_flow.invariance import centred_logits, divergence
from qkvflow.axes import CONTROL
from qkvflow.models import NeuralOdeLMHeadModel


def control_effect(model: NeuralOdeLMHeadModel, tokens: NamedArray, draws: int, *, key: jax.Array) -> dict[str, float]:
    """Means over `draws` of controls u ~ N(0, 1), one for each sequence of `tokens` {batch, position}.

    Returns:
        `difference`: the seed's number, mean |logits(u) - logits(no control)|, of centred logits; `divergence`: as in
        `experiments.gradient_flow.invariance`; `loss_change`: of the next-token loss on these tokens.
    """
    Control = Axis(CONTROL, model.config.control.dim)
    plain = centred_logits(model, tokens)
    targets = np.asarray(tokens.rearrange(("batch", "position")).array)
    differences, divergences, changes = [], [], []
    for one in jax.random.split(key, draws):
        control = hax.random.normal(one, (tokens.resolve_axis("batch"), Control))
        heard = centred_logits(model, tokens, control)
        differences.append(np.abs(heard - plain).mean())
        divergences.append(divergence(heard, plain))
        changes.append(_loss(heard, targets) - _loss(plain, targets))
    names = ("difference", "divergence", "loss_change")
    return {n: float(np.mean(v)) for n, v in zip(names, (differences, divergences, changes), strict=True)}


def untrained(model: NeuralOdeLMHeadModel, *, key: jax.Array) -> NeuralOdeLMHeadModel:
    """A model of the same configuration with parameters drawn anew."""
    return eqx.filter_jit(lambda key: model.config.build(model.Vocab, key=key))(key)


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Mean next-token loss, nats per token."""
    logits, targets = logits[:, :-1], tokens[:, 1:, None]
    largest = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
    return float((normaliser - np.take_along_axis(logits, targets, -1)[..., 0]).mean())
