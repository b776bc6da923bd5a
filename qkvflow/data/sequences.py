"""The sequences of a text as Levanter's examples."""

from haliax import Axis
from levanter.data import AsyncDataset
from levanter.data.mixture import ConcatDataset
from levanter.data.text import CausalLmDataset, NamedLmDataset
from levanter.data.text.datasets import ChatDataset, PackedTokenDataset
from levanter.models.lm_model import LmExample

from qkvflow.data.at_once import AtOnce
from qkvflow.data.packing import Packed


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


def without_examples(dataset: AsyncDataset) -> AsyncDataset:
    """The tokens from which a component's `CausalLmDataset` makes examples; packed documents as `Packed`; others as
    they are."""
    if isinstance(dataset, ConcatDataset):
        return ConcatDataset({name: without_examples(part) for name, part in dataset.datasets.items()})
    if isinstance(dataset, PackedTokenDataset | ChatDataset):
        return Packed(dataset)
    return dataset.dataset if type(dataset) is CausalLmDataset else dataset
