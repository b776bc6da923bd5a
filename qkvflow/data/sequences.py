"""The sequences of a text as Levanter's examples, many of them made by one program.

Levanter makes each by two calls of compiled functions, which hold Python's lock for longer than a step of a small model
takes on a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from haliax import Axis
from levanter.data import AsyncDataset
from levanter.data.dataset import MappedAsyncDataset
from levanter.data.mixture import ConcatDataset
from levanter.data.text import CausalLmDataset, NamedLmDataset
from levanter.models.lm_model import LmExample

_AT_ONCE = 256  # sequences; a power of two


class Sequences(MappedAsyncDataset[Any, LmExample]):
    """The same examples as Levanter's `NamedLmDataset` over `CausalLmDataset`; from `get_batch`, as NumPy arrays.

    Items that are not tokens of a text (of packed documents, or chats) already are examples, and get their named axes
    one by one.
    """

    def __init__(self, dataset: AsyncDataset, Pos: Axis, *, eos_id: int | None, block_cross_document_attention: bool):
        """
        Args:
            dataset: its items are those of `without_examples`.
            eos_id, block_cross_document_attention: as for `CausalLmDataset`.
        """
        blocked = block_cross_document_attention
        causal = CausalLmDataset(dataset, Pos, eos_id=eos_id, block_cross_document_attention=blocked).fn
        named = NamedLmDataset(dataset, Pos).fn

        def example(item: Any) -> LmExample:
            return named(causal(item) if isinstance(item, dict) else item)

        super().__init__(dataset, example)
        self._examples = jax.jit(jax.vmap(example))

    async def get_batch(self, indices: Sequence[int]) -> Sequence[LmExample]:
        items = await self.dataset.get_batch(indices)
        alike: dict[frozenset[str] | None, list[int]] = {}  # the tokens of a mixture's parts may have other fields
        for place, item in enumerate(items):
            alike.setdefault(frozenset(item) if isinstance(item, dict) else None, []).append(place)
        found: dict[int, LmExample] = {place: self.fn(items[place]) for place in alike.pop(None, [])}
        for places in alike.values():
            for i in range(0, len(places), _AT_ONCE):
                part = places[i : i + _AT_ONCE]
                found |= zip(part, self._of_tokens([items[place] for place in part]), strict=True)
        return [found[place] for place in range(len(items))]

    def _of_tokens(self, items: Sequence[dict[str, np.ndarray]]) -> Iterator[LmExample]:
        # Filled up to a power of two, so that the program is compiled for few numbers of sequences.
        fill = (1 << (len(items) - 1).bit_length()) - len(items)
        stacked = {key: np.stack([*(item[key] for item in items), *[items[-1][key]] * fill]) for key in items[0]}
        leaves, structure = jax.tree.flatten(self._examples(stacked))
        arrays = [np.asarray(leaf) for leaf in leaves]
        return (structure.unflatten([array[i] for array in arrays]) for i in range(len(items)))


def without_examples(dataset: AsyncDataset) -> AsyncDataset:
    """The tokens from which a component's `CausalLmDataset` makes examples; other datasets as they are."""
    if isinstance(dataset, ConcatDataset):
        return ConcatDataset({name: without_examples(part) for name, part in dataset.datasets.items()})
    return dataset.dataset if type(dataset) is CausalLmDataset else dataset
