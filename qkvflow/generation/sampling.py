"""From logits to the next token: temperature, then top-k, then top-p, then a draw that its seed reproduces.

    p = softmax(logits / temperature);  top-k keeps the k likeliest tokens;  top-p keeps, of those and by their
    probabilities, the smallest set of likeliest tokens whose mass reaches p

Temperature 0 is greedy: the likeliest token, the first of equals. The order is that of Hugging Face's `generate`.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qkvflow.errors import UserError

ALL = 2**31 - 1  # the top-k that keeps every token


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of one sequence are chosen. top_k, top_p: None for no limit. seed: any integer.

    The draw at a position depends on seed and position alone, not on what else is in the batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

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


class Sampling(eqx.Module):
    """The options of each sequence of a batch, as arrays."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    seed: Int[Array, "batch"]

    @staticmethod
    def of(options: list[SamplingOptions]) -> "Sampling":
        return Sampling(
            jnp.asarray([o.temperature for o in options], jnp.float32),
            jnp.asarray([min(o.top_k or ALL, ALL) for o in options], jnp.int32),
            jnp.asarray([1.0 if o.top_p is None else o.top_p for o in options], jnp.float32),
            jnp.asarray([o.seed % 2**32 for o in options], jnp.uint32),
        )


def choose(
    logits: Float[Array, "batch vocab"], sampling: Sampling, position: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """The token at `position` of each sequence."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw():
        drawn = jax.vmap(_draw)(log_probabilities(logits, sampling), sampling.seed, position)
        return jnp.where(sampling.temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: greedy)


def log_probabilities(logits: Float[Array, "batch vocab"], sampling: Sampling) -> Float[Array, "batch vocab"]:
    """The logarithm, up to a constant, of the distribution that is drawn from; -inf for what is never drawn.

    A temperature of 0 counts as 1 here.
    """
    logits = logits.astype(jnp.float32)
    logits = logits - logits.max(axis=-1, keepdims=True)
    scaled = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    limited = jnp.any((sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1.0))
    return jax.lax.cond(limited, lambda: _restricted(scaled, sampling), lambda: scaled)  # sorting is slow


def _restricted(scaled, sampling: Sampling):
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    keep = jnp.arange(scaled.shape[-1]) < sampling.top_k[:, None]
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(probability, axis=-1) - probability
    # At p = 1 nothing goes, although the sum of rounded probabilities may reach 1 before the last token.
    keep &= (likelier < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1.0)
    rank_of_token = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(keep, rank_of_token, axis=-1), scaled, -jnp.inf)


def _draw(log_probabilities, seed, position):
    # By this generator alone the draws of a row are the same in any batch.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.categorical(key, log_probabilities).astype(jnp.int32)


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
