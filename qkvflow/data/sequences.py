"""The sequences of a text as Levanter's examples, many of them made by one program.

Levanter makes each by two calls of compiled functions, which hold Python's lock for longer than a step of a small model
takes on a GPU.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.data import AsyncDataset
from levanter.data.dataset import MapFunction, MappedAsyncDataset
from levanter.data.mixture import ConcatDataset
from levanter.data.text import CausalLmDataset, NamedLmDataset
from levanter.data.text.datasets import PackedTokenDataset
from levanter.data.text.examples import GrugLmExample
from levanter.models.lm_model import LmExample

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


class Sequences(AtOnce[LmExample]):
    """The same examples as Levanter's `NamedLmDataset` over `CausalLmDataset`."""

    def __init__(self, dataset: AsyncDataset, Pos: Axis, *, eos_id: int | None, block_cross_document_attention: bool):
        """
        Args:
            dataset: of tokens or, where Levanter makes these otherwise (packed documents, chats), of its examples
                without named axes; see `without_examples`.
            eos_id, block_cross_document_attention: as for `CausalLmDataset`.
        """
        causal = CausalLmDataset(
            dataset, Pos, eos_id=eos_id, block_cross_document_attention=block_cross_document_attention
        )
        named = NamedLmDataset(dataset, Pos)

        super().__init__(dataset, lambda item: named.fn(causal.fn(item) if isinstance(item, dict) else item))


def _within_documents(example: GrugLmExample) -> GrugLmExample:
    """Without loss on padding, and on the first token of a document, which is predicted from another one.

    Differs from Levanter, whose packed sequences count both.
    """
    ids = example.attn_mask.segment_ids
    if ids is None:  # documents that see each other
        return example
    own = ids[0]
    is_inside = (own >= 0) & (jnp.roll(own, -1) == own)
    return dataclasses.replace(example, loss_weight=example.loss_weight * is_inside)


def without_examples(dataset: AsyncDataset) -> AsyncDataset:
    """The tokens from which a component's `CausalLmDataset` makes examples; packed documents as examples whose loss
    stays within a document; other datasets as they are."""
    if isinstance(dataset, ConcatDataset):
        return ConcatDataset({name: without_examples(part) for name, part in dataset.datasets.items()})
    if isinstance(dataset, PackedTokenDataset):
        return AtOnce(dataset, _within_documents)
    return dataset.dataset if type(dataset) is CausalLmDataset else dataset
