"""Places: the values inside a block that have a name, so that they can be looked at and changed from outside."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from haliax import NamedArray


def apart(*values: NamedArray) -> tuple[NamedArray, ...]:
    """The same values, of which something is computed beside the forward pass. XLA is kept from seeing that the pass
    computes the same: it would read both from one place, compile that in another way, and round otherwise."""
    return jax.lax.optimization_barrier(values)


class Probe(Protocol):
    """What is told of each place while a forward pass is traced. It hands on what the pass goes on with."""

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
