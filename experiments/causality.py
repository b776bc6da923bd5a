"""No number without causality: changing a token must leave all logits before it as they are, bit for bit."""

from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import NamedArray

from qkvflow.errors import UserError


def check_causality(model: Callable[[NamedArray], NamedArray], tokens: NamedArray, name: str) -> list[int]:
    """
    Args:
        model: tokens {batch, position} -> logits {batch, position, vocab}.
        tokens: real text; one in the middle, the second and the last of each sequence are changed, one at a time.
        name: of the model, for the message.

    Returns:
        the positions that were tried.

    Errors: `UserError` if a logit before the changed token moves at all, or none from it on.
    """
    tokens = tokens.rearrange(("batch", "position"))
    logits_of = eqx.filter_jit(lambda m, tokens: m(tokens).rearrange(("batch", "position", "vocab")).array)
    plain = np.asarray(logits_of(model, tokens))
    length, vocab = plain.shape[1:]
    tried = sorted({1, length // 2, length - 1})
    for j in tried:
        other = hax.named(tokens.array.at[:, j].set((tokens.array[:, j] + 1) % vocab), tokens.axes)
        changed = np.asarray(jax.device_get(logits_of(model, other)))
        if not np.array_equal(plain[:, :j], changed[:, :j]):
            moved = float(np.abs(plain[:, :j] - changed[:, :j]).max())
            raise UserError(
                f"{name} sees the future: token {j} was changed, and logits before it moved by up to {moved:.3g}. Its"
                " loss says nothing, and is not accepted"
            )
        if np.array_equal(plain[:, j:], changed[:, j:]):
            raise UserError(
                f"{name} does not hear its input: token {j} was changed, and no logit moved. Its loss is not accepted"
            )
    return tried
