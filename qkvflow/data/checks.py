"""Checks that there is enough text for training and evaluation, before anything is compiled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from levanter.data.text import ConcatDatasetComponent, DatasetComponent, LmDataConfig
from levanter.store.cache import TreeCache

from qkvflow.data.packing import check_prebuilt, check_something_counts, is_stream, tell_what_is_cut
from qkvflow.errors import UserError

_BLOCK_LIMIT = 1 << 16  # Levanter's blocks are smaller


@dataclass(frozen=True)
class TokenCounts:
    """Tokens in each component that has its own data for the split."""

    train: dict[str, int]
    validation: dict[str, int]


def check_enough_tokens(data: LmDataConfig, seq_len: int, is_training: bool = True) -> TokenCounts:
    """Builds or loads all token caches and counts their tokens.

    Args:
        data: the result of `DataConfig.resolve`.
        seq_len: tokens of one training sequence.
        is_training: whether a message may name keys of a training.

    Raises:
        UserError: the weight of a component is so small that nothing of it would be read, which is told before any
            work. A training component, or its validation part, has less than one sequence, or
            `num_validation_sequences` leaves nothing for training; the message gives the numbers. Or
            `max_train_batches` names no component.
    """
    if is_training:
        check_weights(data)
    caches = data.build_caches("train")
    train = _counts(data, caches, seq_len, "training", is_training)
    # Components in `num_validation_sequences` are evaluated on part of their training sequences instead.
    held_out_caches = {
        name: cache
        for name, cache in data.build_caches("validation").items()
        if name not in (data.num_validation_sequences or {})
    }
    validation = _counts(data, held_out_caches, seq_len, "validation", is_training)
    for name, component in data.components.items():
        missing = [part for part in _caches_of(data, name) if part not in train]
        if isinstance(component, DatasetComponent | ConcatDatasetComponent) and is_trained_on(data, name) and missing:
            raise UserError(
                f"component {missing[0]!r} has no training data. Give it some, or set its weight in "
                "`train_weights` to 0 if it is for validation only."
            )
    unknown = sorted(set(data.max_train_batches or {}) - set(data.components))
    if unknown:
        raise UserError(
            f"max_train_batches has {', '.join(unknown)}, which no component is called. Components:"
            f" {', '.join(data.components)}."
        )
    for name, held_out in (data.num_validation_sequences or {}).items():
        parts = [part for part in _caches_of(data, name) if part in train]
        # Of packed documents there are at most as many sequences as documents.
        available = sum(
            train[part] // seq_len if is_stream(component_of(data, part)) else len(caches[part]) for part in parts
        )
        if not 0 < held_out < available:
            raise UserError(
                f"num_validation_sequences takes {held_out} sequences of component {name!r}, which has "
                f"{available} of {seq_len} tokens; take at least 1 and leave at least 1 for training"
            )
    return TokenCounts(train, validation)


def check_weights(data: LmDataConfig) -> None:
    """Checks that each component with a weight has at least one sequence in each block of the mixture.

    Raises:
        UserError: one has none, because Levanter rounds `weight * mixture_block_size` down.
    """
    block = data.mixture_block_size
    for number, weights in enumerate(_phases(data), 1):
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items() if weight > 0} if total > 0 else {}
        lost = [name for name, share in shares.items() if int(share * block) == 0]
        if not lost:
            continue
        name = min(lost, key=shares.__getitem__)
        share, where = shares[name], "" if isinstance(data.train_weights, Mapping) else f" of phase {number}"
        raise UserError(
            f"`data.train_weights`{where} give {name!r} the share {share:.3g}, so that nothing of it would be read: of"
            f" a block of {block} sequences (`data.mixture_block_size`) that is less than one. {_larger_block(share)}"
            f" give it a weight of at least {1 / block:.3g} of the sum, or 0 to leave it out."
        )


def _larger_block(share: float) -> str:
    """How `mixture_block_size` would help a component."""
    size = math.ceil(1 / share)
    size += int(share * size) == 0  # by rounding
    if size >= _BLOCK_LIMIT:
        return f"No block is large enough (the largest has {_BLOCK_LIMIT - 1}):"
    return f"Set `data.mixture_block_size` to at least {size}, or"


def is_trained_on(data: LmDataConfig, name: str) -> bool:
    """Whether a component has a non-zero weight in any phase of training."""
    if data.train_weights is None:
        return True
    return any(weights.get(name, 0) > 0 for weights in _phases(data))


def _phases(data: LmDataConfig) -> list[Mapping[str, float]]:
    """The weights of each phase of training."""
    weights = data.train_weights or {}
    return [weights] if isinstance(weights, Mapping) else [own for _, own in weights]


def _counts(
    data: LmDataConfig, caches: Mapping[str, TreeCache[dict]], seq_len: int, purpose: str, is_training: bool
) -> dict[str, int]:
    counts = {}
    for name, cache in caches.items():
        component = component_of(data, name)
        tokens = cache.flat_field_length(component.format.token_data_key) if len(cache) else 0
        needed = seq_len if is_stream(component) else 1  # elsewhere each document may be one padded sequence
        if tokens < needed:
            raise UserError(_too_short(name, purpose, tokens, needed, is_training))
        check_prebuilt(name, component, cache, seq_len)
        what = f"the {purpose} text of component {name!r}"
        check_something_counts(component, cache, seq_len, what)
        tell_what_is_cut(component, cache, seq_len, what)
        counts[name] = tokens
    return counts


def _too_short(name: str, purpose: str, tokens: int, needed: int, is_training: bool) -> str:
    found = f"the {purpose} text of component {name!r} has {tokens} tokens, but one sequence needs {needed}"
    if not is_training:
        return f"{found}. Give more text."
    more = "more text" if purpose == "training" else "more text for validation (or a bigger validation_fraction)"
    return f"{found}. Give {more}" + (f", or set train_seq_len to at most {tokens}." if tokens > 1 else ".")


def _caches_of(data: LmDataConfig, name: str) -> list[str]:
    """The names of a component's caches: its own, or those of the parts of a joined one."""
    component = data.components.get(name)
    return [f"{name}/{c}" for c in component.children] if isinstance(component, ConcatDatasetComponent) else [name]


def component_of(data: LmDataConfig, name: str) -> DatasetComponent:
    """The component whose tokens the cache `name` holds; `parent/child` for a part of a joined one."""
    if name in data.components:
        return data.components[name]
    parent, child = name.split("/", 1)
    return data.components[parent].children[child]
