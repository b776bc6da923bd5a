"""When a token stops integrating: a rule that predicts from the steps so far what the rest of the flow would change.

    velocity   |x_k - x_{k-1}| (L - k) / |x_k|, how far the rest would carry it at this speed, as a share of it
    kl         KL(p_k | p_{k-1}) of its predictions after and before the last step, in nats
    margin     1 - (p - p'), with p and p' the two largest probabilities of its prediction

A token stops after the first step k >= min_steps at which this is below the threshold; it is never below 0. Predictions
are the outputs of norm and head. The rule uses only the token's own state, which depends only on its prefix. Sources:
`margin`, Schuster et al., Confident Adaptive Language Modeling (arXiv 2207.07061); `kl`, Geiping et al., Scaling up
Test-Time Compute with Latent Reasoning (arXiv 2502.05171).
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, Int

from qkvflow.axes import BATCH, EMBED
from qkvflow.errors import UserError
from qkvflow.ranges import Count, NotNegative, check_ranges

RULES = ("kl", "velocity", "margin")
OWN = -1  # in place of a row's limit: that of the rule itself
_VOCAB = "vocab"


@dataclass(frozen=True)
class ExitConfig:
    """`--exit '{rule: kl, threshold: 0.01, min_steps: 1}'`. A rule that texts share may have other limits for each, see
    `Exit.of_rows`.

    Attributes:
        rule: `kl`, `velocity` or `margin`: the number that decides whether a token exits.
        threshold: limit of that number; 0 means the full model.
        min_steps: minimum number of steps of every token.
    """

    rule: str
    threshold: NotNegative
    min_steps: Count = 1

    def __post_init__(self):
        check_ranges(self)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, numbers.Real):
            raise UserError(f"exit: threshold must be a number of at least 0, got {self.threshold!r:.80}.")
        if self.rule not in RULES:
            raise UserError(f"exit: rule: {self.rule!r} is not known. Choices: {', '.join(RULES)}.")

    @staticmethod
    def of(keys: "Mapping[str, Any] | ExitConfig") -> "ExitConfig":
        """From keys and values.

        Raises:
            UserError: it is no mapping, a key is missing or not known, or a value is wrong.
        """
        if isinstance(keys, ExitConfig):
            return keys
        known = '{"rule": "kl", "threshold": 0.01, "min_steps": 1}'
        if not isinstance(keys, Mapping):
            raise UserError(f"exit must be a mapping such as {known}, got {keys!r:.80}.")
        try:
            return ExitConfig(**keys)
        except TypeError:
            raise UserError(f"exit must have keys such as {known}, got {dict(keys)!r:.80}.") from None


class Exit(eqx.Module):
    """A rule with its limits, which may be traced: numbers for all tokens, or [batch] for those of each row.

    Attributes:
        least: steps that every token makes, whatever its row's min_steps.
    """

    threshold: Float[Array, "..."]
    min_steps: Int[Array, "..."]
    rule: str = eqx.field(static=True)
    least: int = eqx.field(static=True)

    @staticmethod
    def of(config: ExitConfig, steps: int, has_coda: bool) -> "Exit":
        """For a flow of `steps` steps.

        Raises:
            UserError: the rule cannot be asked there.
        """
        if config.min_steps >= steps:
            raise UserError(
                f"exit: min_steps must be below the {steps} steps of the model, or no token can exit; got"
                f" {config.min_steps}."
            )
        if has_coda and config.rule != "velocity":
            raise UserError(
                f"exit: rule: {config.rule} predicts from the state of the flow, which this model's coda changes first"
                " (model.coda_layers). Use rule: velocity."
            )
        limits = jnp.asarray(config.threshold, jnp.float32), jnp.asarray(config.min_steps, jnp.int32)
        return Exit(*limits, config.rule, config.min_steps)

    def of_rows(self, threshold: Float[Array, "batch"], min_steps: Int[Array, "batch"]) -> "Exit":
        """With limits for each row; where they are `OWN`, the rule's own. No min_steps may be below `least`."""
        own = jnp.broadcast_to(self.threshold, threshold.shape), jnp.broadcast_to(self.min_steps, min_steps.shape)
        given = [jnp.where(row == OWN, o, row) for row, o in zip((threshold, min_steps), own, strict=True)]
        return dataclasses.replace(self, threshold=given[0], min_steps=given[1])

    def leaves(
        self, k: int, going: NamedArray, before: NamedArray, after: NamedArray, steps: int, logits: Callable
    ) -> NamedArray:
        """{batch, position} bool: which of the tokens `going` stop after k of `steps` steps.

        The rule is computed only if there is a token that it might stop.

        Args:
            logits: of a state.
        """
        Batch = going.resolve_axis(BATCH)
        can = (self.threshold > 0) & (self.min_steps <= k)
        asked = (going & hax.named(jnp.broadcast_to(can, (Batch.size,)), Batch)).rearrange(going.axes)
        below = hax.named(jnp.broadcast_to(self.threshold, (Batch.size,)), Batch)

        def ask(before: NamedArray, after: NamedArray) -> NamedArray:
            return asked & (self._rest(k, before, after, steps, logits) < below).rearrange(asked.axes)

        def keep(before: NamedArray, after: NamedArray) -> NamedArray:
            return hax.zeros_like(asked)

        return jax.lax.cond(hax.any(asked).array, ask, keep, before, after)

    def _rest(self, k: int, before, after, steps: int, logits: Callable) -> NamedArray:
        if self.rule == "velocity":
            moved, length = (_length(x.astype(jnp.float32)) for x in (after - before, after))
            return moved * (steps - k) / hax.maximum(length, 1e-30)
        log_p = hnn.log_softmax(logits(after), _VOCAB)
        if self.rule == "kl":
            kl = hax.sum(hax.exp(log_p) * (log_p - hnn.log_softmax(logits(before), _VOCAB)), _VOCAB)
            return hax.maximum(kl, 0.0)  # rounding may leave less
        largest = hax.top_k(hax.exp(log_p), _VOCAB, 2)[0]
        return hax.maximum(1.0 - (largest[_VOCAB, 0] - largest[_VOCAB, 1]), 0.0)


def with_limits(model, threshold: Float[Array, "batch"], min_steps: Int[Array, "batch"]):
    """The model with limits for each row in its rule, if it has one (see `Exit.of_rows`)."""
    is_rule = lambda node: isinstance(node, Exit)  # noqa: E731
    return jax.tree.map(lambda n: n.of_rows(threshold, min_steps) if is_rule(n) else n, model, is_leaf=is_rule)


class ExitMemory(eqx.Module):
    """The memories of a flow's evaluations.

    Attributes:
        spent: {batch, 2}: steps and tokens so far. of: steps that there are.
    """

    evaluations: tuple
    spent: Int[Array, "batch 2"]
    of: int = eqx.field(static=True)

    @staticmethod
    def empty(evaluations: tuple, Batch: Axis, of: int) -> "ExitMemory":
        return ExitMemory(evaluations, jnp.zeros((Batch.size, 2), jnp.int32), of)


@dataclass(frozen=True)
class Exited:
    """The result of exits.

    Attributes:
        steps: total steps of all `tokens`, out of `of` per token.
    """

    steps: int
    tokens: int
    of: int

    def __add__(self, other: "Exited") -> "Exited":
        return Exited(self.steps + other.steps, self.tokens + other.tokens, self.of)

    def __sub__(self, other: "Exited") -> "Exited":
        return Exited(self.steps - other.steps, self.tokens - other.tokens, self.of)

    @property
    def mean(self) -> float:
        """Steps per token."""
        return self.steps / max(1, self.tokens)

    def __str__(self) -> str:
        return f"exits: {self.mean:.2f} of {self.of} steps per token"


def _length(x: NamedArray) -> NamedArray:
    return hax.sqrt(hax.sum(hax.square(x), EMBED))
