"""Attention heads, and the channels within each, in the order of the layer before.

A head computes softmax(q k^T) v and hands it to the output projection. So channels of v may change places if those of
the projection do, and channels of q together with those of k, unless rotary positions give each a frequency of its own.
Where query heads share keys and values, they keep their group, and its order of channels.

For two heads (groups), one linear assignment finds the best order of such channels; how alike they are then makes the
table of another one, between the heads. That is the best order there is, unless several queries share a head of keys:
their order and that of the channels are found in turn, from two starts, and the better end is taken.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from haliax import NamedArray
from scipy.optimize import linear_sum_assignment

from qkvflow.axes import HEAD_SIZE, HEADS, KV_HEAD, LAYERS, QKV

_FIXED = "fixed"  # channels that stay where they are
_ROUNDS = 10


class Part(NamedTuple):
    """An array of the attention, or the query, key or value of one that holds all three.

    Attributes:
        rows: [layers, groups, members, channels, rest]; one member where a group shares the array. What is written
            into it is written into the array.
        channels: parts of the same name have the same channels.
    """

    rows: np.ndarray
    channels: str


class _Order(NamedTuple):
    """Of the members of a group and of the channels within it: where what stands in each place comes from."""

    score: float
    members: np.ndarray
    channels: dict[str, np.ndarray]


def parts(name: str, array: NamedArray, groups: int) -> tuple[np.ndarray, tuple[str, ...], list[Part]]:
    """An array with heads as a copy that may be written into, the names of its axes, and the parts of that copy.

    Args:
        name: of the layer that it belongs to, such as `q_proj`.
        groups: heads of keys and values.
    """
    is_fused = QKV in {axis.name for axis in array.axes}
    unit = KV_HEAD if KV_HEAD in {axis.name for axis in array.axes} else HEADS
    front = array.rearrange(((QKV,) if is_fused else ()) + (LAYERS, unit, HEAD_SIZE, ...))
    copy, layers, size = np.array(front.array), array.axis_size(LAYERS), array.axis_size(HEAD_SIZE)
    shape = (layers, groups, array.axis_size(unit) // groups, size, -1)
    kinds = ("qk", "qk", "vo") if is_fused else (_FIXED if name in ("q_proj", "k_proj") else "vo",)
    found = [Part(rows.reshape(shape), kind) for rows, kind in zip(copy if is_fused else [copy], kinds, strict=True)]
    return copy, tuple(axis.name for axis in front.axes), found


def order_heads(every: Iterable[Part]) -> None:
    """Writes each layer in the order that is nearest to the one before it."""
    every = list(every)
    layers, groups = every[0].rows.shape[:2]
    for k in range(1, layers):
        tables = [(part.channels, _likeness(part.rows[k - 1], part.rows[k])) for part in every]
        found = [[_best([(kind, t[i, :, :, j]) for kind, t in tables]) for j in range(groups)] for i in range(groups)]
        to = linear_sum_assignment([[order.score for order in row] for row in found], maximize=True)[1]
        for part in every:
            before = part.rows[k].copy()
            for i, j in enumerate(to):
                order = found[i][j]
                members = order.members if before.shape[1] > 1 else [0]
                channels = order.channels.get(part.channels, np.arange(before.shape[2]))
                part.rows[k, i] = before[j][members][:, channels]


def _likeness(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Products of all rows: [groups, members, channels, groups, members, channels]."""
    flat = [np.asarray(rows, np.float32).reshape(-1, rows.shape[-1]) for rows in (one, other)]
    return (flat[0] @ flat[1].T).reshape(*one.shape[:3], *other.shape[:3])


def _best(tables: list[tuple[str, np.ndarray]]) -> _Order:
    """The best order of a group's members and channels, given the likeness of two groups in all parts,
    [members, channels, members, channels]."""
    count, size = max(len(table) for _, table in tables), tables[0][1].shape[1]
    kinds = {kind for kind, _ in tables} - {_FIXED}
    unmoved = dict.fromkeys(kinds, np.arange(size))
    if count == 1:
        return _channels(tables, np.arange(1), kinds)
    by_fixed = _members([(kind, table) for kind, table in tables if kind == _FIXED], count, unmoved)
    ends = [_climbed(tables, members, unmoved) for members in (np.arange(count), by_fixed)]
    return max(ends, key=lambda order: order.score)


def _climbed(tables, members: np.ndarray, channels: dict[str, np.ndarray]) -> _Order:
    """Channels for the members, members for the channels, and so on as long as it grows."""
    best = _Order(-np.inf, members, channels)
    for _ in range(_ROUNDS):
        order = _channels(tables, best.members, set(channels))
        if order.score <= best.score:
            break
        best = order._replace(members=_members(tables, len(members), order.channels))
    return _channels(tables, best.members, set(channels))


def _channels(tables, members: np.ndarray, kinds: Iterable[str]) -> _Order:
    """The best channels for an order of the members."""
    found, score = {}, 0.0
    for kind in (*kinds, _FIXED):
        sums = [sum(t[a, :, b] for a, b in _pairs(t, members)) for name, t in tables if name == kind]
        if not sums:
            continue
        total = np.sum(sums, axis=0)
        rows = np.arange(len(total))
        columns = rows if kind == _FIXED else linear_sum_assignment(total, maximize=True)[1]
        score += float(total[rows, columns].sum())
        if kind != _FIXED:
            found[kind] = columns
    return _Order(score, members, found)


def _members(tables, count: int, channels: dict[str, np.ndarray]) -> np.ndarray:
    """The best members for an order of the channels."""
    likeness = np.zeros((count, count))
    for kind, table in tables:
        if len(table) == count:
            rows = np.arange(table.shape[1])
            likeness += table[:, rows, :, channels.get(kind, rows)].sum(0)
    return linear_sum_assignment(likeness, maximize=True)[1]


def _pairs(table: np.ndarray, members: np.ndarray) -> list[tuple[int, int]]:
    return list(enumerate(members)) if len(table) > 1 else [(0, 0)]
