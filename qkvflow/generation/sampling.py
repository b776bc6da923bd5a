"""From logits to the next token: bias, temperature, then top-k, then top-p, then a draw reproducible by its seed.

    p = softmax((logits + bias) / temperature);  top-k keeps the k most likely tokens;  top-p keeps, of these, the
    smallest set of most likely tokens whose probabilities sum to at least p

Temperature 0 is greedy: the most likely token, the first one on ties. The order is that of Hugging Face's `generate`.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qkvflow.errors import UserError
from qkvflow.models.exits import OWN, ExitConfig

ALL = 2**31 - 1  # the top-k that keeps every token; as a biased token: none
MAX_BIASES = 300  # maximum number of tokens with a bias per sequence


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of one sequence. top_k, top_p: None for no limit. seed: any integer.

    Attributes:
        bias: added to the logits of single tokens.
        logprobs: whether to return the log-probabilities of the chosen tokens too.
        draft_tokens: drafts per pass of the full grid (see `qkvflow.generation.drafting`), limited by the engine's own
            number, which None selects. An engine that does not draft ignores it.
        exits: when its tokens stop integrating, by the rule that the engine has, with no lower min_steps than the
            engine's own limits, which None selects. An engine without exits ignores it.

    The draw at a position depends only on seed and position, not on the rest of the batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    draft_tokens: int | None = None
    exits: ExitConfig | None = None

    def __post_init__(self):
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}.")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise UserError(
                f"top_k must be a whole number of at least 1, or left out for no limit; got {self.top_k!r}."
            )
        if self.top_p is not None and (not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise UserError(f"top_p must lie in (0, 1], where 1 is no limit; got {self.top_p!r}.")
        if not _is_integer(self.seed):
            raise UserError(f"seed must be a whole number, got {self.seed!r}.")
        if self.draft_tokens is not None and (not _is_integer(self.draft_tokens) or self.draft_tokens < 0):
            raise UserError(f"draft_tokens must be a whole number of at least 0, got {self.draft_tokens!r}.")
        if len(self.bias) > MAX_BIASES:
            raise UserError(f"bias may be given for {MAX_BIASES} tokens, got {len(self.bias)}.")


class Sampling(eqx.Module):
    """The options of each sequence of a batch, as arrays."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    seed: Int[Array, "batch"]
    logprobs: Bool[Array, "batch"]
    draft_tokens: Int[Array, "batch"]
    exit_threshold: Float[Array, "batch"]
    exit_min_steps: Int[Array, "batch"]

    @staticmethod
    def of(options: Sequence[SamplingOptions]) -> "Sampling":
        # NumPy arrays: each is transferred to the device with the call that uses it.
        return Sampling(
            np.asarray([o.temperature for o in options], np.float32),
            np.asarray([min(o.top_k or ALL, ALL) for o in options], np.int32),
            np.asarray([1.0 if o.top_p is None else o.top_p for o in options], np.float32),
            np.asarray([int(o.seed) % 2**32 for o in options], np.uint32),
            np.asarray([o.logprobs for o in options], bool),
            np.asarray([ALL if o.draft_tokens is None else min(o.draft_tokens, ALL) for o in options], np.int32),
            np.asarray([OWN if o.exits is None else o.exits.threshold for o in options], np.float32),
            np.asarray([OWN if o.exits is None else o.exits.min_steps for o in options], np.int32),
        )


class Bias(eqx.Module):
    """Added to the logits of single tokens of each sequence of a batch."""

    tokens: Int[Array, "batch biases"]  # padded with `ALL`
    values: Float[Array, "batch biases"]

    @staticmethod
    def of(options: Sequence[SamplingOptions]) -> "Bias":
        tokens = np.full((len(options), MAX_BIASES), ALL, np.int32)
        values = np.zeros((len(options), MAX_BIASES), np.float32)
        for i, o in enumerate(options):
            tokens[i, : len(o.bias)], values[i, : len(o.bias)] = list(o.bias), list(o.bias.values())
        return Bias(tokens, values)

    def add(self, logits: Float[Array, "batch vocab"], active: Bool[Array, "batch"]) -> Float[Array, "batch vocab"]:
        """The logits including the bias.

        Args:
            active: the sequences that need it; the bias of others costs nothing.
        """
        rows = jnp.arange(len(logits))[:, None]

        def added():
            return logits.at[rows, self.tokens].add(self.values, mode="drop")

        return jax.lax.cond(jnp.any(active[:, None] & (self.tokens < logits.shape[-1])), added, lambda: logits)


def choose(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    position: Int[Array, "batch"],
    active: Bool[Array, "batch"] | None = None,
    stream: int = 0,
) -> Int[Array, "batch"]:
    """The token at `position` of each sequence.

    Args:
        active: as for `Bias.add`; all by default.
        stream: selects one of several independent draws at the position.
    """
    wanted = jnp.ones(len(logits), bool) if active is None else active
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn():
        of_row = partial(draw, stream=stream)
        tokens = jax.vmap(of_row)(log_probabilities(logits, sampling, wanted), sampling.seed, position)
        return jnp.where(sampling.temperature > 0, tokens, greedy)

    return jax.lax.cond(jnp.any(wanted & (sampling.temperature > 0)), drawn, lambda: greedy)


def log_probabilities(
    logits: Float[Array, "batch vocab"], sampling: Sampling, active: Bool[Array, "batch"] | None = None
) -> Float[Array, "batch vocab"]:
    """The logarithm, up to a constant, of the sampling distribution; -inf for tokens that are never drawn.

    Args:
        logits: including bias. A temperature of 0 counts as 1 here.
    """
    wanted = jnp.ones(len(logits), bool) if active is None else active
    logits = logits.astype(jnp.float32)
    logits = logits - logits.max(axis=-1, keepdims=True)
    scaled = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    limited = jnp.any(wanted & ((sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1.0)))
    return jax.lax.cond(limited, lambda: _restricted(scaled, sampling), lambda: scaled)  # sorting is slow


def _restricted(scaled, sampling: Sampling):
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    keep = jnp.arange(scaled.shape[-1])[None] < sampling.top_k[:, None]
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(probability, axis=-1) - probability
    # At p = 1 all tokens stay, although the sum of rounded probabilities may reach 1 before the last one.
    p = sampling.top_p[:, None]  # as small as it may be, or 0 in fp32: the likeliest token stays
    keep &= (likelier < p) | (p >= 1.0) | (jnp.arange(scaled.shape[-1])[None] == 0)
    rank_of_token = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(keep, rank_of_token, axis=-1), scaled, -jnp.inf)


def draw(log_probabilities: Float[Array, "vocab"], seed, position, stream: int = 0) -> Int[Array, ""]:
    """A token drawn with the noise of a position."""
    return jax.random.categorical(noise_key(seed, position, stream), log_probabilities).astype(jnp.int32)


def noise_key(seed, position, stream: int = 0):
    """The key of the noise at a position; `stream` 0 is for its token."""
    # Only with this generator are the draws of a row the same in any batch.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.fold_in(key, stream) if stream else key


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
