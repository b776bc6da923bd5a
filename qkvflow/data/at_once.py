"""Levanter's mapped datasets, many of whose items are made by one program.

Levanter makes each by two calls of compiled functions, which hold Python's lock for longer than a step of a small model
takes on a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from levanter.data import AsyncDataset
from levanter.data.dataset import MapFunction, MappedAsyncDataset

_AT_ONCE = 256  # items; a power of two

U = TypeVar("U")


class AtOnce(MappedAsyncDataset[Any, U]):
    """Levanter's mapped dataset, whose `get_batch` maps all items of the same structure by one vmapped program.

    Its results are in NumPy arrays, with the same values.
    """

    def __init__(self, dataset: AsyncDataset, fn: MapFunction[U]):
        super().__init__(dataset, fn)
        self._mapped = jax.jit(jax.vmap(fn))

    async def get_batch(self, indices: Sequence[int]) -> Sequence[U]:
        alike: dict[Any, list[tuple[int, list]]] = {}  # the parts of a mixture may have different items
        for place, item in enumerate(await self.dataset.get_batch(indices)):
            leaves, structure = jax.tree.flatten(item)
            alike.setdefault(structure, []).append((place, leaves))
        found: dict[int, U] = {}
        for structure, items in alike.items():
            for i in range(0, len(items), _AT_ONCE):
                places, leaves = zip(*items[i : i + _AT_ONCE], strict=True)
                found |= zip(places, self._map(structure, leaves), strict=True)
        return [found[place] for place in range(len(indices))]

    def _map(self, structure: Any, items: Sequence[list]) -> Iterator[U]:
        """items: the leaves of each, of this structure."""
        # Filled up to a power of two, so that the program is compiled for few numbers of items.
        fill = (1 << (len(items) - 1).bit_length()) - len(items)
        stacked = [np.stack([*leaves, *leaves[-1:] * fill]) for leaves in zip(*items, strict=True)]
        leaves, made = jax.tree.flatten(self._mapped(structure.unflatten(stacked)))
        arrays = [np.asarray(leaf) for leaf in leaves]
        return (made.unflatten([array[i] for array in arrays]) for i in range(len(items)))
