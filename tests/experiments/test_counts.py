"""What n-grams reach: the vectorised counts against the formula, written out."""

import math
from collections import Counter

import numpy as np
import pytest

from experiments.counts import BEGINNING, ngram_losses, reached
from experiments.recipes import Recipe
from experiments.texts import Builtin

VOCAB = 5


def by_formula(train, n, context, token):
    """p_n(token | context), Witten and Bell, by counting over again."""
    if n == 0:
        return 1 / VOCAB
    lower = by_formula(train, n - 1, context, token)
    before = tuple(context[len(context) - n + 1 :])
    after = Counter(train[i] for i in range(n - 1, len(train)) if tuple(train[i - n + 1 : i]) == before)
    total = sum(after.values())
    return (after[token] + len(after) * lower) / (total + len(after)) if total else lower


def test_counts_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    train, report = rng.integers(0, 4, 60).tolist(), rng.integers(0, VOCAB, 40).tolist()  # 4 is never seen in training
    for n, loss in ngram_losses(train, report, VOCAB).items():
        each = [by_formula(train, min(int(n), i + 1), report[:i], token) for i, token in enumerate(report)]
        assert loss == pytest.approx(-sum(map(math.log, each)) / len(each), rel=1e-12)
    for context in ([0, 1], [3, 3], [4, 2]):
        assert sum(by_formula(train, 3, context, token) for token in range(VOCAB)) == pytest.approx(1.0)


def test_more_context_tells_more_where_there_is_more_to_tell():
    cycle = [0, 0, 1] * 50  # after a 0 either may come; after two tokens there is no doubt
    losses = ngram_losses(cycle, cycle, VOCAB)
    assert losses["1"] > losses["2"] > 5 * losses["3"] > 0.0


def test_losses_at_other_depths_are_compared_with_counts_on_the_text_that_they_read(tmp_path):
    recipe = Recipe.of("configs/wikitext2/standard.yaml", {"trainer": {"num_train_steps": 5}})
    text = Builtin().prepare(tmp_path)
    found = reached({"report": 4, BEGINNING: 2}, recipe, text)
    words = recipe.tokenizer()
    known, asked = (words.encode(text.read(part)) for part in ("train", "report"))
    for part, batches in (("report", 4), (BEGINNING, 2)):
        own = ngram_losses(known[: 5 * recipe.tokens], asked[: batches * recipe.tokens], len(words))
        assert found[part] == own
    assert found["report"] != found[BEGINNING]
