"""Modes of fine-tuning on models: what refinement keeps, and what it refuses."""

import jax
import numpy as np
import pytest
from support.models import build, random_tokens, small_config

from qkvflow.errors import UserError
from qkvflow.runs.modes import FlowMode
from qkvflow.weights import BasisConfig


def refined(base, dim: int, steps: int | None = None):
    mode = FlowMode(refine=dim)
    return mode.adapt(base, mode.model_config(base.config, steps), key=jax.random.PRNGKey(0))


@pytest.mark.parametrize(("basis", "dim", "finer"), [("linear", 3, 5), ("cosine", 2, 4)])
def test_a_finer_basis_holds_the_same_weights(basis, dim, finer):
    """At any depth, to the rounding of sums over one more function: 1e-5 of logits of order 1."""
    base = build(small_config(BasisConfig(basis, dim)))
    tuned = refined(base, finer, steps=4)
    assert (tuned.config.weights.dim, tuned.config.depth.steps) == (finer, 4)
    assert tuned.transformer.flow.weights.mlp.c_fc.basis.dim == finer
    expected = base.with_depth(base.config.depth.on_grid(4))(random_tokens()).array
    np.testing.assert_allclose(tuned(random_tokens()).array, expected, atol=1e-5)


def test_what_cannot_be_held_is_told():
    with pytest.warns(match="spline with 6 functions cannot hold W.t. exactly.*is off by"):
        refined(build(small_config(BasisConfig("spline", 5))), 6)


def test_refusals():
    with pytest.raises(UserError, match=r"mode.refine: 2 functions of time are fewer than the 3"):
        refined(build(small_config("basis")), 2)
    with pytest.raises(UserError, match=r"weights: {type: basis}.*are generated"):
        refined(build(small_config()), 8)
