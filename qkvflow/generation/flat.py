"""Pytrees as flat lists of arrays: flattening a model in Python takes longer than a step of a small one."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ARRAY = "array"  # marks the place of an array


@dataclass(frozen=True)
class Kind:
    """The structure of a pytree without its arrays. Compared by identity first, hashed once: each step does both."""

    structure: Any
    rest: tuple

    def join(self, arrays) -> Any:
        """The pytree with these arrays."""
        arrays = iter(arrays)
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in self.rest]
        return jax.tree.unflatten(self.structure, leaves)

    @cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.rest))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return self is other or (
            isinstance(other, Kind) and self.rest == other.rest and self.structure == other.structure
        )


def flat(tree) -> tuple[list, Kind]:
    """The arrays of a pytree, or their shapes, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    shape = jax.ShapeDtypeStruct
    arrays = [leaf if isinstance(leaf, shape) else jnp.asarray(leaf) for leaf in leaves if _is_array(leaf)]
    return arrays, Kind(structure, tuple(_ARRAY if _is_array(leaf) else leaf for leaf in leaves))


def kind_of(make) -> Kind:
    """The structure of the result of `make()`, without computing its arrays."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(make))
    return Kind(structure, tuple(_ARRAY for _ in leaves))


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
