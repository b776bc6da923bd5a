"""No token sees the future: changing token j leaves all logits before j bit-identical, whatever the model is."""

import itertools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from support.models import build, change, heavy, llama, random_tokens, small_config

from qkvflow.blocks import Inputs
from qkvflow.depth import SOLVERS, DepthConfig

CHANGED = (1, 5, 11)


def logits_before_change(logits_of, j):
    tokens = random_tokens()
    other = change(tokens, j)
    before, after = logits_of(tokens).array, logits_of(other).array
    np.testing.assert_array_equal(before[:, :j], after[:, :j])
    assert not np.array_equal(before[:, j:], after[:, j:]), "the change must show from j on"


def check(config):
    model = build(config)
    logits_of = eqx.filter_jit(lambda tokens: model(tokens))
    for j in CHANGED:
        logits_before_change(logits_of, j)


@pytest.mark.parametrize(
    ("form", "solver"), [*itertools.product(["parallel", "sequential"], SOLVERS), ("split", "euler")]
)
def test_solvers_and_forms(solver, form):
    check(small_config(form=form, depth=DepthConfig(solver=solver, steps=2)))


@pytest.mark.parametrize("weights", ["generated", "constant", "per_layer"])
@pytest.mark.parametrize("evaluate", ["batched", "in_scan"])
@pytest.mark.parametrize("adjoint", ["checkpoint", heavy("selective"), heavy("direct")])
def test_weights_and_adjoints(weights, evaluate, adjoint):
    depth = DepthConfig(steps=3, evaluate=evaluate, adjoint=adjoint, endpoint="left")
    check(small_config(weights=weights, depth=depth, prelude_layers=1, coda_layers=1))


def test_parallel_layers_around_the_flow():
    check(small_config(prelude_layers=1, coda_layers=1, ordinary_form="parallel"))


@pytest.mark.parametrize("solver", [heavy("euler"), "rk4"])
@pytest.mark.parametrize("weights", ["generated", heavy("constant"), heavy("per_layer")])
@pytest.mark.parametrize("form", ["parallel", "sequential", heavy("split"), "official"])
def test_llama(form, weights, solver):
    depth = DepthConfig(solver=solver, steps=2)
    check(small_config(weights=weights, block=llama(form), depth=depth, prelude_layers=int(form == "official")))


@pytest.mark.parametrize("block", [None, llama("parallel")])
def test_weights_that_have_grown_without_bounds(block):
    """As after training at a rate that is too high: scores of attention far beyond -1e9, with which kernels mask."""
    model = build(small_config(weights="constant", depth=DepthConfig(steps=2), **({"block": block} if block else {})))
    grown = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 1e7 if "attn" in jax.tree_util.keystr(path) and eqx.is_inexact_array(x) else x, model
    )
    logits_of = eqx.filter_jit(lambda tokens: grown(tokens))
    expected = logits_of(random_tokens()).array
    assert np.isfinite(expected).all()
    for j in CHANGED:
        np.testing.assert_array_equal(logits_of(change(random_tokens(), j)).array[:, :j], expected[:, :j])


def test_discretised():
    model = build(small_config()).discretise(5)
    logits_of = eqx.filter_jit(lambda tokens: model(tokens))
    for j in CHANGED:
        logits_before_change(logits_of, j)


def test_segments_do_not_see_each_other():
    """Levanter's loader separates documents by segment ids: the second document must not depend on the first."""
    model = build(small_config())
    segments = hax.named(jnp.asarray([0] * 6 + [1] * 6), "position")
    mask = AttentionMask.causal().with_segment_ids(segments)
    logits_of = eqx.filter_jit(lambda tokens: model(tokens, mask))
    tokens = random_tokens()
    other = change(tokens, 2)
    a, b = logits_of(tokens).array, logits_of(other).array
    np.testing.assert_array_equal(a[:, 6:], b[:, 6:])
    assert not np.array_equal(a[:, 2:6], b[:, 2:6])


def test_the_test_can_fail():
    """With a mask that lets tokens see the future the same check fails."""
    model = build(small_config())
    full = AttentionMask.explicit(hax.ones((hax.Axis("position", 12), hax.Axis("key_position", 12)), dtype=jnp.bool_))
    logits_of = eqx.filter_jit(lambda tokens: model(tokens, full))
    with pytest.raises(AssertionError):
        logits_before_change(logits_of, 5)


def test_gradient_of_early_logits_ignores_late_tokens():
    """The same law for the derivative: d logits[:j] / d embedding of token k >= j is exactly zero."""
    model = build(small_config())
    x = model.embeddings(random_tokens())
    grad = jax.grad(lambda x: model.transformer(x, Inputs.of())["position", 0:5].sum().array)(x)
    assert float(jnp.abs(grad["position", 5:12].array).max()) == 0.0
    assert float(jnp.abs(grad["position", 0:5].array).max()) > 0.0
