"""Classifies a piece of text as one of two texts, from counts of byte 4-grams only.

p(c | h) = (count(h c) + k) / (count(h) + 256 k),    h: the N - 1 = 3 bytes before c
score    = sum log p_B(c | h) - log p_A(c | h)       over the piece, from its 4th byte on; B if it is above 0
"""

import math
from collections import Counter
from collections.abc import Sequence

from qkvflow.errors import UserError

N, K = 4, 0.01


class NgramModel:
    """Add-k smoothed byte N-grams of one text."""

    def __init__(self, text: bytes):
        self.grams = Counter(text[i : i + N] for i in range(len(text) - N + 1))
        self.contexts: Counter[bytes] = Counter()
        for gram, count in self.grams.items():
            self.contexts[gram[:-1]] += count

    def log_probability(self, piece: bytes) -> float:
        """Nats of the bytes of a piece from its N-th on, each given the N - 1 before it."""
        grams = (piece[i : i + N] for i in range(len(piece) - N + 1))
        return sum(math.log((self.grams[gram] + K) / (self.contexts[gram[:-1]] + 256 * K)) for gram in grams)


class Judge:
    """Distinguishes text B from text A; both are given by equally many bytes, so that neither is smoothed more."""

    def __init__(self, a: bytes, b: bytes):
        """Counts the N-grams of the texts.

        Raises:
            UserError: a text is shorter than one N-gram.
        """
        size = min(len(a), len(b))
        if size < N:
            raise UserError(f"the judge needs at least {N} bytes of each text, got {len(a)} and {len(b)}")
        self.a, self.b = NgramModel(a[:size]), NgramModel(b[:size])

    def score(self, piece: bytes) -> float:
        """Log-likelihood ratio in nats; above 0 for B. 0 for pieces of fewer than N bytes."""
        return self.b.log_probability(piece) - self.a.log_probability(piece)

    def share_of_b(self, pieces: Sequence[bytes]) -> float:
        """Share of the pieces classified as B; a score of exactly 0 counts as half a piece."""
        scores = [self.score(piece) for piece in pieces]
        return sum(0.5 if score == 0 else float(score > 0) for score in scores) / len(scores)


def pieces_of(text: bytes, length: int, most: int) -> list[bytes]:
    """Up to `most` pieces of `length` bytes, evenly spread over the text, without overlap."""
    starts = range(0, len(text) - length + 1, max(length, len(text) // most))
    return [text[start : start + length] for start in starts][:most]
