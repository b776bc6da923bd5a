"""Named values inside a block, which can be read and edited from outside."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from haliax import NamedArray


def apart(*values: NamedArray) -> tuple[NamedArray, ...]:
    """The same values, for computations outside the forward pass. This hides from XLA that the pass computes the same:
    it would share the result, compile it differently, and round differently."""
    return jax.lax.optimization_barrier(values)


class Probe(Protocol):
    """Receives each named value while a forward pass is traced, and returns the value that the pass continues with."""

    def see(self, place: str, value: NamedArray) -> NamedArray:
        """`value`, or what stands in its place, with the same axes."""
        ...

    def beside(
        self,
        place: str,
        make: Callable[[], NamedArray],
        use: Callable[[NamedArray], NamedArray],
        plain: NamedArray,
    ) -> NamedArray:
        """For a value that is computed beside the pass, `make()`: `plain`, or where it is changed `use` of it."""
        ...

    def within(self, part: str) -> "Probe":
        """For the places of a part of the model, whose names begin with its own."""
        ...

    def steps(self, count: int, evaluations: int) -> Any:
        """For the places of a flow of `count` steps with so many evaluations of the block; it watches the solve, and is
        told where each evaluation begins."""
        ...
