"""Packed documents: whole ones side by side in a sequence, filled up with padding, instead of one stream of tokens."""

import dataclasses
import warnings
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from levanter.data.text import (
    ChatLmDatasetFormat,
    DatasetComponent,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.data.text.datasets import ChatDataset, PackedTokenDataset
from levanter.data.text.examples import GrugLmExample
from levanter.data.text.formats import SupervisedTextProcessor
from levanter.store.cache import TreeCache

from qkvflow.data.at_once import AtOnce
from qkvflow.errors import Notice, UserError

_Stream = TextLmDatasetFormat | SupervisedLmDatasetFormat  # formats whose documents may be one stream of tokens


def check_pack(name: str, component: DatasetComponent) -> None:
    """
    Raises:
        UserError: Levanter does not have this kind of packing, or not for this format.
    """
    pack, least, more = component.pack, 0, "; false is one stream of tokens without padding."
    if pack and isinstance(component.format, PrebuiltLmDatasetFormat):
        raise UserError(f"component {name!r}: records of `format: prebuilt` are whole sequences. Leave `pack` out")
    if isinstance(component.format, ChatLmDatasetFormat):
        least, more = 1, "."
        if pack is None:
            pack = True if component.format.pack is None else component.format.pack
    if pack == "pad" or (isinstance(pack, int) and pack < least):
        raise UserError(
            f"component {name!r}: `pack: {pack}` is not available. Choices: true (up to 64 documents in a sequence) or"
            f" their greatest number: `pack: 1` gives each document a padded sequence of its own{more}"
        )


def is_stream(component: DatasetComponent) -> bool:
    """Whether the tokens of all documents are one stream, cut into sequences without gaps."""
    return isinstance(component.format, _Stream) and not component.pack


def check_prebuilt(name: str, component: DatasetComponent, cache: TreeCache[dict], seq_len: int) -> None:
    """
    Raises:
        UserError: a record of `format: prebuilt` is not a sequence.
    """
    if not isinstance(component.format, PrebuiltLmDatasetFormat):
        return
    lengths = _lengths(cache, component.format.token_data_key)
    wrong = np.flatnonzero(lengths != seq_len)
    if wrong.size:
        raise UserError(
            f"component {name!r}: record {wrong[0] + 1} of `format: prebuilt` has {lengths[wrong[0]]} tokens, but each"
            f" must be a whole sequence of {seq_len}"
        )


def _lengths(cache: TreeCache[dict], key: str) -> np.ndarray:
    """Tokens of each record."""
    offsets = cache.jagged_array_tree()[key].offsets
    return np.diff(np.asarray(offsets[1 : len(cache) + 1].read().result()), prepend=0)


def tell_what_is_cut(component: DatasetComponent, cache: TreeCache[dict], seq_len: int, what: str) -> None:
    """A notice where packed documents are longer than a sequence: Levanter cuts them.

    Args:
        what: the text, for the notice.
    """
    is_packed = isinstance(component.format, _Stream | ChatLmDatasetFormat) and not is_stream(component)
    if not is_packed or not len(cache):
        return
    lengths = _lengths(cache, component.format.token_data_key)
    lost = int(np.maximum(lengths - seq_len, 0).sum())
    if lost:
        instead = ", or read all of them with `pack: false`" if isinstance(component.format, _Stream) else ""
        text = (
            f"{what}: {int((lengths > seq_len).sum()):,} of {len(lengths):,} documents are longer than a sequence of"
            f" {seq_len} tokens, and `pack` cuts them there: {lost:,} of {int(lengths.sum()):,} tokens are not read."
            f" Raise train_seq_len{instead}."
        )
        warnings.warn(Notice(text), stacklevel=2)


def check_something_counts(component: DatasetComponent, cache: TreeCache[dict], seq_len: int, what: str) -> None:
    """
    Args:
        what: the text, for the error.

    Raises:
        UserError: only answers count, and no document has a token of one where it is read: the loss would be 0.
    """
    # Weights of prompts stand where a token is predicted from; masks of chats, where it is: one place later.
    form, first = component.format, 0
    if isinstance(form, ChatLmDatasetFormat) and form.mask_user_turns:
        key, first, instead = "assistant_masks", 1, ", or set mask_user_turns: false in its `format`"
    elif isinstance(form, SupervisedLmDatasetFormat) and not is_stream(component):
        key, instead = SupervisedTextProcessor.loss_weights_key, ", or read all of them with `pack: false`"
    else:
        return
    masks = cache.jagged_array_tree()[key]
    for begin in range(0, len(cache), 1024):  # in most texts, the first document has an answer
        some = masks.get_batch_sync(range(begin, min(begin + 1024, len(cache))))
        if any(mask[first : first + seq_len - 1].any() for mask in some):
            return
    raise UserError(
        f"{what}: only answers count, and none of its {len(cache):,} documents has one within the {seq_len} tokens that"
        f" `pack` reads of each. Raise train_seq_len{instead}."
    )


class Packed(AtOnce[GrugLmExample]):
    """Levanter's packed sequences, without loss on padding and on the first token of a document, which is predicted
    from another one; documents that see each other (`block_cross_document_attention: false`) keep the latter.

    Differs from Levanter, whose packed sequences count both.
    """

    def __init__(self, levanters: PackedTokenDataset | ChatDataset):
        block = levanters.block_cross_document_attention

        def example(item: tuple[Mapping, Mapping]) -> GrugLmExample:
            made, document = levanters.fn(item), item[1]["input_ids"]
            following = jnp.roll(document, -1)
            is_counted = (document >= 0) & (following >= 0) & ((following == document) | (not block))
            return dataclasses.replace(made, loss_weight=made.loss_weight * is_counted)

        super().__init__(levanters.packed, example)
