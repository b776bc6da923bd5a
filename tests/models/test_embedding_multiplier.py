"""x(0) = m (token + position): what m is, and what it is for."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from levanter.models.lm_model import LmExample
from support.models import VOCAB, build, change, llama, random_tokens, small_config

from qkvflow.analysis.continuity import continuity
from qkvflow.blocks import Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.weights import BasisConfig

TOKENS = random_tokens()
LOGITS = eqx.filter_jit(lambda model, tokens: model(tokens).rearrange(("batch", "position", "vocab")).array)


@pytest.mark.parametrize(
    "block", [small_config().block, llama(), llama(tie_word_embeddings=False)], ids=["gpt2", "llama", "own head"]
)
def test_it_scales_the_initial_state_alone(block):
    """The same logits as embeddings times m, with the final norm divided by m if the head shares them (to 1e-6)."""
    m = 8.0
    model = build(small_config("basis", block=block, embedding_multiplier=m))

    def times(module, factor):
        return jax.tree.map(lambda x: x * factor if eqx.is_inexact_array(x) else x, module)

    folded = eqx.tree_at(
        lambda m: (m.embeddings, m.transformer.norm),
        model,
        (
            dataclasses.replace(times(model.embeddings, m), multiplier=1.0),
            times(model.transformer.norm, 1 / m if block.tie_word_embeddings else 1.0),
        ),
    )
    np.testing.assert_allclose(LOGITS(folded, TOKENS), LOGITS(model, TOKENS), atol=1e-6)
    plain = dataclasses.replace(model, embeddings=dataclasses.replace(model.embeddings, multiplier=1.0))
    assert np.abs(np.asarray(LOGITS(plain, TOKENS) - LOGITS(model, TOKENS))).max() > 1e-2


def test_a_changed_token_moves_no_logit_before_it():
    model = build(small_config("basis", embedding_multiplier=50.0))
    for one in (model, model.discretise(5)):
        before, after = LOGITS(one, TOKENS), LOGITS(one, change(TOKENS, 7))
        np.testing.assert_array_equal(before[:, :7], after[:, :7])
        assert (before[:, 7:] != after[:, 7:]).any(axis=-1).all()


def test_with_it_few_steps_show_the_order():
    """Heun with 8 steps, where the states are as long as what moves them; from a state near zero it shows no order."""
    example = LmExample(TOKENS, hax.ones(TOKENS.axes).at["position", -1].set(0.0), Inputs.of().mask)
    found = {}
    for m in (0.05, 50.0):
        depth = DepthConfig(steps=8, solver="heun")
        model = build(small_config(BasisConfig("cosine", 2), depth=depth, embedding_multiplier=m))
        found[m] = continuity(model, example, loss=lambda m: 1.0, solvers=("rk4",)).order
    assert found[50.0] == pytest.approx(2, rel=0.1)
    assert found[0.05] < 1.5


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan"), float("inf")])
def test_it_must_be_a_positive_number(multiplier):
    with pytest.raises(UserError, match="`embedding_multiplier` must be"):
        small_config(embedding_multiplier=multiplier).build(VOCAB, key=jax.random.PRNGKey(0))
