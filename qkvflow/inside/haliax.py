"""Haliax's `named_jit`, for functions that are called many times with arguments of the same structure."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax.partitioning import ResourceMapping, infer_resource_partitions
from haliax.util import is_named_array
from jax.stages import Lowered, Wrapped

_ARRAY = object()  # in place of an array


@dataclass(frozen=True)
class Structure:
    """A pytree without its arrays; hashable.

    Attributes:
        tree: JAX's definition of the tree. others: all leaves, with `_ARRAY` in place of arrays.
    """

    tree: Any
    others: tuple

    @staticmethod
    def of(pytree: Any) -> "tuple[list, Structure]":
        """Its arrays, or shapes in their place, and its structure."""
        leaves, tree = jax.tree.flatten(pytree)
        others = tuple(_ARRAY if eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
        arrays = [leaf for leaf, other in zip(leaves, others, strict=True) if other is _ARRAY]
        return arrays, Structure(tree, others)

    def filled(self, arrays: Sequence) -> Any:
        """The pytree with these arrays."""
        rest = iter(arrays)
        return self.tree.unflatten(next(rest) if leaf is _ARRAY else leaf for leaf in self.others)


class Program:
    """`function(state, *rest)`, compiled: the arrays of the state are donated, and those of the result divided between
    devices by `mapping`, which is also the mapping inside.

    Equals `hax.named_jit(function, axis_resources=mapping, out_axis_resources=mapping, donate_args=(True,))`, and
    also compiles for shapes (`lower`).

    Reason: `named_jit` takes its arguments apart and joins them about ten times per call, checks every named array each
    time, and traces twice. A training step of a small model then takes up to half as long again (experiments/LOG.md).
    """

    def __init__(self, function: Callable, mapping: ResourceMapping):
        self._function, self._mapping = function, mapping
        self._compiled: dict[tuple[Structure, Structure], tuple[Wrapped, Structure]] = {}

    def __call__(self, state: Any, *rest: Any) -> Any:
        with hax.axis_mapping(self._mapping):
            compiled, out, arrays = self._of(state, rest)
            return out.filled(compiled(*arrays))

    def lower(self, state: Any, *rest: Any) -> Lowered:
        """For these arguments, or for their shapes."""
        with hax.axis_mapping(self._mapping):
            compiled, _, arrays = self._of(state, rest)
            return compiled.lower(*arrays)

    def _of(self, state: Any, rest: tuple) -> tuple[Wrapped, Structure, tuple[list, list]]:
        (donated, own), (kept, others) = Structure.of(state), Structure.of(rest)
        key = own, others
        if key not in self._compiled:
            self._compiled[key] = self._jitted(own, others, donated, kept)
        return *self._compiled[key], (donated, kept)

    def _jitted(self, own: Structure, others: Structure, donated: list, kept: list) -> tuple[Wrapped, Structure]:
        found: list[Structure] = []

        @functools.partial(jax.jit, inline=True)  # `step` below reuses the trace that `eval_shape` makes
        def flat(donated, kept):
            arrays, structure = Structure.of(self._function(own.filled(donated), *others.filled(kept)))
            found.append(structure)
            return arrays

        def step(donated, kept):
            return flat(donated, kept)

        shapes = jax.eval_shape(flat, donated, kept)
        shardings = _shardings(found[0].filled(shapes), self._mapping)
        return jax.jit(step, donate_argnums=0, out_shardings=shardings), found[0]


def _shardings(shapes: Any, mapping: ResourceMapping) -> list:
    """The sharding of each array of a result, given by its shapes."""
    divided = infer_resource_partitions(shapes, mapping)
    nodes, own = (jax.tree.leaves(tree, is_leaf=lambda x: x is None or is_named_array(x)) for tree in (shapes, divided))
    return [sharding for node, sharding in zip(nodes, own, strict=True) if Structure.of(node)[0]]
