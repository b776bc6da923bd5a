"""Losses of n-grams, to compare with the loss of a model."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.recipes import Recipe
from experiments.texts import Text

MOST = 5  # tokens of the longest n-grams
BEGINNING = "beginning"  # the batches of the part `report` on which flows are evaluated at other depths
Counts = dict[str, float]  # n -> loss


def reached(
    batches: Mapping[str, int | None], recipe: Recipe, text: Text, trained: Sequence[Text] = ()
) -> dict[str, Counts]:
    """Losses of n-grams on the evaluated parts of a text, counted in as many tokens as `recipe` trains on.

    Args:
        batches: part, or BEGINNING -> number of batches evaluated; None: all.
        trained: the texts in whose first tokens they are counted, in equal shares; by default `text` itself.

    Returns:
        part -> n = 1 to MOST, as a string -> loss in nats per token.
    """
    words, trained = recipe.tokenizer(), trained or [text]
    share = recipe.steps * recipe.tokens // len(trained)
    known = [token for one in trained for token in words.encode(one.read("train"))[:share]]
    found = {}
    for part, most in batches.items():
        asked = words.encode(text.read("report" if part == BEGINNING else part))[: (most or 0) * recipe.tokens or None]
        found[part] = ngram_losses(known, asked, len(words))
    return found


def about(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{loss:.3f} (n = {n})" for n, loss in counts.items())


def ngram_losses(train: Sequence[int], report: Sequence[int], vocab: int, most: int = MOST) -> Counts:
    """Loss in nats per token of n-grams counted in `train`, n = 1 to `most`, with the smoothing of Witten and Bell:

        p_n(c | h) = (N(h c) + T(h) p_{n-1}(c | h')) / (N(h) + T(h)),   p_0 = 1 / vocab,

    h the n - 1 tokens before c, h' the same without the first, N the number of occurrences, T(h) the number of distinct
    tokens that follow h; p_{n-1} if h never occurs. (Witten and Bell 1991, method C, interpolated.) The first tokens of
    `report` are predicted from fewer tokens.

    Args:
        train, report: token ids, [position], below `vocab`; `train` has at least `most` tokens.

    Returns:
        n, as a string -> mean loss over all of `report`.
    """
    p = np.full(len(report), 1.0 / vocab)
    known, asked = (np.asarray(tokens, dtype=np.int64) for tokens in (train, report))
    # The index of h before each token; -1 if it does not occur in `train`.
    h, h_asked = np.zeros_like(known), np.zeros_like(asked)
    found = {}
    for n in range(1, most + 1):
        grams, numbers, times = np.unique(h * vocab + known, return_inverse=True, return_counts=True)
        size = max(h.max(), h_asked.max()) + 1
        total, kinds = np.bincount(h, minlength=size), np.bincount(grams // vocab, minlength=size)
        wanted = np.where(h_asked < 0, -1, h_asked * vocab + asked)
        place = np.minimum(np.searchsorted(grams, wanted), len(grams) - 1)
        occurs = grams[place] == wanted
        seen, different = (np.where(h_asked < 0, 0, each[h_asked]) for each in (total, kinds))
        together = np.where(occurs, times[place], 0)
        lower = p[n - 1 :]
        p[n - 1 :] = np.where(seen > 0, (together + different * lower) / np.maximum(seen + different, 1), lower)
        found[str(n)] = float(-np.log(p).mean())
        h, known = numbers[:-1], known[1:]
        h_asked, asked = np.where(occurs, place, -1)[:-1], asked[1:]
    return found
