"""The documents of packed sequences, each a row of its own: a memory of earlier positions has no segment ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from qkvflow.axes import BATCH, POSITION
from qkvflow.blocks import Inputs


class Rows(eqx.Module):
    """A batch of documents. Only the first `count` positions of a row are real; the others have weight 0.

    Attributes:
        targets: the token after each, also where that begins the next document of the packed sequence.
        weight: that of each target in the loss.
        first: place of the first token in the packed sequence, where positions are counted.
        count: 0 for a row that only fills up the batch.
    """

    tokens: Int[Array, "batch position"]
    targets: Int[Array, "batch position"]
    weight: Float[Array, "batch position"]
    control: Float[Array, "batch position control"] | None
    first: Int[Array, " batch"]
    count: Int[Array, " batch"]


@dataclass(frozen=True)
class Documents:
    """The documents of a text in which a target counts, the longest first: those of a batch are about equally long.

    Attributes:
        tokens, weight, control: the packed sequences, [sequence, position, ...].
        sequence, first, count: [document], which tokens of which sequence it is.
        batch_size: documents read at a time.
        sharding: of their batches; None leaves them on one device.
    """

    tokens: np.ndarray
    weight: np.ndarray
    control: np.ndarray | None
    sequence: np.ndarray
    first: np.ndarray
    count: np.ndarray
    batch_size: int
    sharding: NamedSharding | None

    @staticmethod
    def of(examples: Sequence[LmExample]) -> "Documents":
        """By the segment ids of `examples`; as many documents at a time as an example has sequences, on its devices."""
        tokens, weight, ids = (np.concatenate(a) for a in zip(*map(_arrays, examples), strict=True))
        controls = [_control(example) for example in examples]
        control = None if controls[0] is None else np.concatenate([c for c in controls if c is not None])
        begins = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        sequence, first = np.nonzero(begins)
        followed = np.append(sequence[1:] == sequence[:-1], False)
        end = np.where(followed, np.roll(first, -1), ids.shape[1])
        counted = np.pad(np.cumsum(weight > 0, axis=1), ((0, 0), (1, 0)))
        used = np.flatnonzero(counted[sequence, end] > counted[sequence, first])
        order = used[np.argsort(first[used] - end[used], kind="stable")]
        sequence, first, end = sequence[order], first[order], end[order]
        size, sharding = _batch_of(examples[0])
        return Documents(tokens, weight, control, sequence, first, end - first, size, sharding)

    def __iter__(self) -> Iterator[Rows]:
        """Batches of one shape, [batch_size, length of the packed sequences]."""
        length = self.tokens.shape[1]
        targets = np.roll(self.tokens, -1, axis=1)
        for at in range(0, len(self.count), self.batch_size):
            sequence, first, count = (a[at : at + self.batch_size] for a in (self.sequence, self.first, self.count))
            sequence, first, count = (np.pad(a, (0, self.batch_size - len(a))) for a in (sequence, first, count))
            places = np.minimum(first[:, None] + np.arange(length), length - 1)
            whole = (self.tokens, targets, self.weight, self.control)
            tokens, target, weight, control = jax.tree.map(lambda a, i=(sequence[:, None], places): a[i], whole)
            real = np.arange(length) < count[:, None]
            rows = Rows(tokens, target, weight * real, control, first.astype(np.int32), count.astype(np.int32))
            yield rows if self.sharding is None else jax.device_put(rows, self.sharding)


def _arrays(example: LmExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, weights and segment ids, [sequence, position]."""
    tokens, weight, mask = _batched(example.tokens), _batched(example.loss_weight), Inputs.of_example(example).mask
    ids = np.zeros(tokens.array.shape, np.int32)
    if isinstance(mask, AttentionMask) and mask.segment_ids is not None:
        own = mask.segment_ids[0].broadcast_axis(tokens.resolve_axis(BATCH))
        ids = np.asarray(own.rearrange((BATCH, POSITION)).array)
    return np.asarray(tokens.array), np.asarray(weight.array, np.float32), ids


def _control(example: LmExample) -> np.ndarray | None:
    """[sequence, position, control]."""
    control = Inputs.of_example(example).control
    if control is None:
        return None
    axes = _batched(example.tokens).axes
    return np.asarray(control.broadcast_axis(axes).rearrange((BATCH, POSITION, ...)).array)


def _batch_of(example: LmExample) -> tuple[int, NamedSharding | None]:
    """How many sequences it has, and how they lie on devices."""
    tokens = example.tokens
    if not tokens.has_axis(BATCH):
        return 1, None
    sharding = tokens.array.sharding
    if not isinstance(sharding, NamedSharding):
        return tokens.axis_size(BATCH), None
    spec = (*sharding.spec, *[None] * tokens.ndim)[tokens.axis_indices(BATCH)]
    return tokens.axis_size(BATCH), NamedSharding(sharding.mesh, PartitionSpec(spec))


def _batched(a: NamedArray) -> NamedArray:
    a = a if a.has_axis(BATCH) else a.broadcast_axis(Axis(BATCH, 1))
    return a.rearrange((BATCH, POSITION))
