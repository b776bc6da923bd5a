"""What counting reaches: losses of n-grams, beside which the loss of a model tells what it has learned so far."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


def ngram_losses(train: Sequence[int], report: Sequence[int], vocab: int, most: int = 3) -> dict[str, float]:
    """Loss in nats per token of n-grams counted in `train`, n = 1 to `most`, with the smoothing of Witten and Bell:

        p_n(c | h) = (N(h c) + T(h) p_{n-1}(c | h')) / (N(h) + T(h)),   p_0 = 1 / vocab,

    h the n - 1 tokens before c, h' those but the first, N how often something occurs, T(h) how many different tokens
    follow h; p_{n-1} where h never occurs. (Witten and Bell 1991, method C, interpolated.) The first tokens of `report`
    are predicted by what is before them.

    Args:
        train, report: token ids, [position], below `vocab`; vocab ** most must be below 2 ** 63.

    Returns:
        n, as a string -> mean loss over all of `report`.
    """
    p = np.full(len(report), 1.0 / vocab)
    found = {}
    for n in range(1, most + 1):
        grams, times = np.unique(_keys(train, n, vocab), return_counts=True)
        before, group = np.unique(grams // vocab, return_inverse=True)
        total, kinds = np.bincount(group, weights=times), np.bincount(group)
        at = _keys(report, n, vocab)
        together, seen, different = _at(at, grams, times), *(_at(at // vocab, before, v) for v in (total, kinds))
        lower = p[n - 1 :]
        p[n - 1 :] = np.where(seen > 0, (together + different * lower) / np.maximum(seen + different, 1), lower)
        found[str(n)] = float(-np.log(p).mean())
    return found


def _keys(tokens: Sequence[int], n: int, vocab: int) -> Keys:
    """A number for each n tokens in a row, the last one its remainder by `vocab`."""
    ids = np.asarray(tokens, dtype=np.int64)
    count = max(len(ids) - n + 1, 0)
    keys = np.zeros(count, dtype=np.int64)
    for i in range(n):
        keys = keys * vocab + ids[i : i + count]
    return keys


def _at(wanted: Keys, keys: Keys, values: NDArray) -> NDArray:
    """The values of the keys that are wanted; 0 for others. keys: sorted."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
