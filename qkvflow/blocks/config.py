"""YAML `block:` the choices for B(x; W). Each builds an ordinary block and describes what surrounds it."""

import abc
import math
from dataclasses import dataclass

import draccus
from haliax import Axis

from qkvflow.errors import UserError
from qkvflow.ranges import ProperShare, check_ranges


@dataclass(frozen=True)
class BlockConfig(draccus.ChoiceRegistry, abc.ABC):
    """What B is. The block does not depend on time or solver; its arrays are plain NamedArrays.

    Attributes:
        embed_pdrop: dropout of the embeddings.
    """

    embed_pdrop: ProperShare = 0.0

    def __post_init__(self):
        check_ranges(self)

    @abc.abstractmethod
    def init(self, Embed: Axis, *, key):
        """Draw an ordinary block: a module called as block(x, inputs, key=...)."""

    @abc.abstractmethod
    def norm(self, Embed: Axis):
        """A fresh norm of the block's kind, also used before the head."""

    @abc.abstractmethod
    def check(self, Embed: Axis) -> None:
        """Raise UserError if the block does not fit a state of this width."""

    @property
    def depends_on_step(self) -> bool:
        """Whether B depends on the length of the step in which it is evaluated (`Inputs.step`)."""
        return False

    @property
    @abc.abstractmethod
    def learned_positions(self) -> bool:
        """Whether positions are embedded by a table (GPT-2)."""

    @property
    @abc.abstractmethod
    def tie_word_embeddings(self) -> bool:
        """Whether the head is the token embedding."""

    @abc.abstractmethod
    def flops_per_token(self, hidden_dim: int, context_length: int) -> float:
        """Forward floating point operations of one evaluation of B for one token."""

    def flops_of_products(self, hidden_dim: int) -> float:
        """The part of `flops_per_token` in products with weights, whose results `adjoint: selective` keeps."""
        return self.flops_per_token(hidden_dim, 0)

    def kv_cache_width(self, hidden_dim: int) -> int:
        """Numbers that one evaluation of B keeps for each token in cached generation: keys and values of all heads."""
        return 2 * hidden_dim


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}: {value!r} is not known. Choices: {', '.join(choices)}.")


def check_heads(hidden_dim: int, num_heads: int) -> None:
    if num_heads < 1 or hidden_dim % num_heads != 0:
        near = min(divisors(hidden_dim), key=lambda n: abs(n - num_heads))
        raise UserError(
            f"hidden_dim ({hidden_dim}) must be divisible by block.num_heads ({num_heads}), because each head takes an"
            f" equal share of the width. The nearest number of heads that divides it is {near}."
        )


def divisors(number: int) -> list[int]:
    """Ascending; of a number beyond 10^12, which no model has, only 1 and itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0] if number <= 10**12 else [1]
    return sorted({*small, *(number // n for n in small)})
