"""Sequences with the control of each token: that of the token's own document, so that controls do not leak."""

from collections.abc import Callable, Mapping, Sequence

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray
from levanter.data import AsyncDataset
from levanter.data.mixture import ConcatDataset
from levanter.data.text import GrugLmExample
from levanter.models.lm_model import LmExample
from levanter.store.cache import TreeCache

from qkvflow.axes import CONTROL
from qkvflow.data.control.records import control_table
from qkvflow.data.sequences import AtOnce

Item = dict[str, np.ndarray] | GrugLmExample  # those of `qkvflow.data.sequences.Sequences`
Pair = tuple[Item, np.ndarray]


class ControlledExample(LmExample):
    """A Levanter example {position} with control {position, control}, for a model with control."""

    control: NamedArray | None = None


class DocumentControls:
    """u(i) = control of the document that contains token i of the stream.

    Uses 8 + 4 dim bytes of memory per document, whatever its length.
    """

    def __init__(self, cache: TreeCache[dict], dim: int):
        rows = len(cache)
        self.table = control_table(cache, dim)
        # The first offset is the number of rows; a document ends where the next one begins.
        self.ends = np.asarray(cache.jagged_array_tree()["input_ids"].offsets[1 : rows + 1].read().result())

    def of_tokens(self, start: int, stop: int) -> np.ndarray:
        """fp32 [stop - start, dim] for the tokens `start` to `stop` of the stream."""
        return self.table[np.searchsorted(self.ends, np.arange(start, stop), side="right")]


class SequenceControls(AsyncDataset[Pair]):
    """Levanter's consecutive sequences of a token stream, each paired with its control, fp32 [position, control]."""

    def __init__(self, sequences: AsyncDataset[Item], controls: DocumentControls, seq_len: int):
        self.sequences = sequences
        self.controls = controls
        self.seq_len = seq_len

    async def async_len(self) -> int:
        return await self.sequences.async_len()

    def is_finite(self) -> bool:
        return self.sequences.is_finite()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Pair]:
        items = await self.sequences.get_batch(indices)
        spans = ((int(index) * self.seq_len, (int(index) + 1) * self.seq_len) for index in indices)
        return [(item, self.controls.of_tokens(*span)) for item, span in zip(items, spans, strict=True)]


class ControlledDataset(AtOnce[ControlledExample]):
    """The pairs as examples with named axes; replaces Levanter's `NamedLmDataset`."""

    def __init__(self, pairs: AsyncDataset[Pair], example: Callable[[Item], LmExample]):
        """
        Args:
            example: makes that of a sequence without its control.
        """
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

        @eqx.filter_jit
        def controlled(pair: Pair) -> ControlledExample:
            plain, control = example(pair[0]), pair[1]
            axes = (*plain.tokens.axes, Axis(CONTROL, control.shape[-1]))
            found = ControlledExample(plain.tokens, plain.loss_weight, plain.attn_mask, hax.named(control, axes))
            return jax.lax.with_sharding_constraint(found, sharding)

        super().__init__(pairs, controlled)


def with_sequence_controls(
    name: str, dataset: AsyncDataset, caches: Mapping[str, TreeCache[dict]], Pos: Axis, dim: int
) -> AsyncDataset[Pair]:
    """The sequences of the component `name`, whose tokens are in `caches`, paired with their controls."""
    if isinstance(dataset, ConcatDataset):
        children = {
            child: with_sequence_controls(f"{name}/{child}", part, caches, Pos, dim)
            for child, part in dataset.datasets.items()
        }
        return ConcatDataset(children)
    return SequenceControls(dataset, DocumentControls(caches[name], dim), Pos.size)
