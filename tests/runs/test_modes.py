"""Modes of fine-tuning on models: what refinement keeps, and what it refuses."""

import warnings

import jax
import numpy as np
import pytest
from support.models import build, random_tokens, small_config

from qkvflow.blocks import Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import Notice, UserError
from qkvflow.runs.modes import FlowMode, FullMode, StackMode
from qkvflow.time import grid
from qkvflow.weights import BasisConfig, at, refine


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


def test_a_refined_model_has_the_configuration_of_its_weights():
    """So that what is made from it, by discretising or exporting, can be loaded again."""
    base = build(small_config(BasisConfig("linear", 3)))
    model = refine(base, 5)
    assert model.config == refined(base, 5).config
    assert jax.tree.structure(model) == jax.tree.structure(build(model.config))
    with pytest.raises(UserError, match=r"basis weights"):
        refine(base.discretise(), 5)


@pytest.mark.parametrize("finer", [2, 3])
def test_weights_of_one_function_are_refined_whatever_their_initial_values(finer):
    """Two functions with `init: independent` cannot be drawn, but these are not drawn."""
    base = build(small_config(BasisConfig("chebyshev", 1, "independent")))
    tuned = refined(base, finer)
    assert tuned.config == refine(base, finer).config
    np.testing.assert_allclose(tuned(random_tokens()).array, base(random_tokens()).array, atol=1e-5)


def test_a_flow_keeps_its_adjoint_at_another_depth():
    base = small_config(depth=DepthConfig(solver="euler", steps=3, endpoint="left", adjoint="backsolve"))
    for steps in (None, 6):
        assert FlowMode().model_config(base, steps).depth.adjoint == "backsolve"
    adaptive = small_config(depth=DepthConfig(solver="heun", rtol=1e-3, atol=1e-3, adjoint="backsolve"))
    assert FlowMode().model_config(adaptive, None).depth.is_adaptive
    assert not FlowMode().model_config(adaptive, 6).depth.is_adaptive


def test_layers_that_are_dropped_are_told():
    base = small_config("per_layer", depth=DepthConfig(steps=4))
    with pytest.warns(Notice, match="4 ordinary layers, of which 2 are kept and the rest dropped"):
        config = FullMode().model_config(base, 2)
    model = build(base)
    kept = FullMode().adapt(model, config, key=jax.random.PRNGKey(0))
    rows = model.transformer.flow.weights.at(grid([0.5, 1.0])).mlp.c_fc.weight.array
    np.testing.assert_array_equal(kept.transformer.flow.weights.blocks.stacked.mlp.c_fc.weight.array, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullMode().model_config(base, 4)


def test_what_cannot_be_held_is_told():
    with pytest.warns(match="spline with 6 functions cannot represent W.t. exactly.*with an error of"):
        refined(build(small_config(BasisConfig("spline", 5))), 6)


def test_refusals():
    with pytest.raises(UserError, match=r"mode.refine: 2 functions of time are fewer than the 3"):
        refined(build(small_config("basis")), 2)
    with pytest.raises(UserError, match=r"weights: {type: basis}.*are generated"):
        refined(build(small_config()), 8)


def stacked(base, steps, **options):
    mode = StackMode(**options)
    return mode.adapt(base, mode.model_config(base.config, steps), key=jax.random.PRNGKey(0))


@pytest.mark.parametrize(("order", "rows"), [("stack", [0, 1, 0, 1]), ("repeat", [0, 0, 1, 1])])
def test_stacked_layers_are_copies(order, rows):
    """With residual steps the deeper model is the base applied again: by hand, block after block."""
    base = build(small_config("per_layer", depth=DepthConfig(steps=2, step_size="residual")))
    deeper = stacked(base, 4, order=order)
    assert deeper.config.depth.steps == 4
    assert (
        deeper.config.build(base.Vocab, key=jax.random.PRNGKey(0)).transformer.flow.plan == deeper.transformer.flow.plan
    )
    tokens = random_tokens()
    states = deeper.trajectory(tokens)
    x = deeper.embeddings(tokens)
    for k, row in enumerate(rows):
        x = x + at(base.transformer.flow.weights, base.config.plan.times[row])(x, Inputs.of())
        np.testing.assert_allclose(states["layers", k].array, x.array, atol=1e-5)


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(UserError, match=r"copies the layers of an ordinary model"):
        stacked(build(small_config()), 6)
    base = build(small_config("per_layer"))
    for steps in (None, 3, 4):
        with pytest.raises(UserError, match=r"a larger multiple of 3, got"):
            stacked(base, steps)
    heun = build(small_config("per_layer", depth=DepthConfig(solver="heun", steps=2)))
    with pytest.raises(UserError, match=r"one layer per step"):
        stacked(heun, 4)
