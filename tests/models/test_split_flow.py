"""Flows of split blocks: every way to solve them uses the length of its own steps, and they converge to the ODE."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import build, heavy, is_float, llama, random_tokens, small_config

from qkvflow.analysis.reading import read
from qkvflow.blocks import Gpt2BlockConfig, Inputs
from qkvflow.depth import DepthConfig, StepRange
from qkvflow.errors import UserError
from qkvflow.models.flow import Flow

TOKENS = random_tokens()
logits = eqx.filter_jit(lambda model: model(TOKENS).array)


class Told(eqx.Module):
    """A field that is the length of its step, so that Euler's x(1) is x(0) + h."""

    def __call__(self, x, inputs, *, key=None):
        return hax.full_like(x, inputs.step)


def moved(flow, key=None):
    x = hax.zeros(hax.Axis("embed", 2))
    solution = flow.solve(x, Inputs.of(), key=key)
    return float(solution.end.array[0]), solution


@pytest.mark.parametrize(
    ("depth", "h"),
    [
        (DepthConfig(steps=4), 0.25),
        (DepthConfig(steps=3, step_size="residual"), 1.0),
        (DepthConfig(steps=4, adjoint="direct", coupling=0.99), 0.25),
        (DepthConfig(steps=4, adjoint="backsolve", endpoint="left"), 0.25),
        (DepthConfig(steps=4, solver="heun"), 0.0),
        (DepthConfig(steps=4, solver="rk4", adjoint="reversible"), 0.0),
        (DepthConfig(steps=4, solver="heun", rtol=1e-2), 0.0),
        (DepthConfig(steps=4, solver="heun", adjoint="backsolve"), 0.0),
    ],
)
def test_the_length_that_a_field_is_told(depth, h):
    plan = depth.plan("in_scan")
    assert plan.field_step == h
    length = plan.steps if depth.step_size == "residual" else 1.0
    np.testing.assert_allclose(moved(Flow(Told(), plan))[0], h * length, rtol=1e-6)


def test_each_plan_of_training_has_its_own_length():
    depth = DepthConfig(steps=StepRange(2, 5))
    flow = Flow(Told(), depth.plan("in_scan"), depth.training_plans("in_scan"))
    seen = set()
    for seed in range(24):
        end, solution = moved(flow, jax.random.PRNGKey(seed))
        np.testing.assert_allclose(end, 1 / int(solution.steps), rtol=1e-6)
        seen.add(int(solution.steps))
    assert seen == set(depth.steps.values)
    assert moved(flow)[0] == pytest.approx(1 / 5)  # outside training


def test_one_step_is_that_of_the_solve():
    flow = Flow(Told(), DepthConfig(steps=4).plan("in_scan"))
    x = hax.zeros(hax.Axis("embed", 2))
    assert float(flow.increment(2, x, Inputs.of()).array[0]) == pytest.approx(0.25**2)


@pytest.mark.parametrize("block", [Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="split"), heavy(llama("split"))])
def test_ordinary_layers_and_methods_of_higher_order_are_known_models(block):
    """Bit for bit: with steps of length 1 the sequential model, with two evaluations in a step the parallel one."""
    for depth, form in (
        (DepthConfig(steps=3, step_size="residual"), "sequential"),
        (DepthConfig(solver="heun", steps=2), "parallel"),
    ):
        config = small_config("basis", block=block, depth=depth)
        other = dataclasses.replace(config, block=dataclasses.replace(block, form=form))
        np.testing.assert_array_equal(logits(build(config)), logits(build(other)))


def test_it_converges_to_the_parallel_ode_with_order_one():
    """In float64, towards RK4's end of the parallel field with the same weights; sequential blocks do not."""
    steps, errors = (32, 64, 128, 256), {}
    with jax.enable_x64(True):

        def end(form, depth):
            config = small_config("basis", form, depth)
            # Half the weights: a field that is slow enough for these steps.
            model = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64) / 2 if is_float(a) else a, build(config))
            return eqx.filter_jit(lambda m: m.transformer.flow(m.embeddings(TOKENS), Inputs.of()).array)(model)

        exact = end("parallel", DepthConfig(solver="rk4", steps=64))
        for form in ("split", "sequential"):
            errors[form] = [float(jnp.abs(end(form, DepthConfig(steps=n)) - exact).max()) for n in steps]
    order = -np.polyfit(np.log(steps), np.log(errors["split"]), 1)[0]
    assert 0.8 < order < 1.2, errors
    assert errors["sequential"][-1] > 10 * errors["split"][-1], errors


@pytest.mark.parametrize("block", [Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="split"), heavy(llama("split"))])
def test_discretised_and_read_as_steps_it_is_the_same_function(block):
    """At the trained depth and at another one, whose steps are shorter; layers around it stay ordinary ones."""
    model = build(small_config("basis", block=block, prelude_layers=1, coda_layers=1))
    np.testing.assert_allclose(logits(model.discretise()), logits(model), atol=1e-5)
    other = model.with_depth(DepthConfig(steps=5))
    np.testing.assert_allclose(logits(model.discretise(5)), logits(other), atol=1e-5)
    assert np.abs(logits(other) - logits(model)).max() > 1e-3
    around = {"prelude_layers": 1, "coda_layers": 1, "weights": "basis"}
    for part in ("prelude", "coda"):
        sequential = build(small_config(block=dataclasses.replace(block, form="sequential"), **around))
        x, inputs = model.embeddings(TOKENS), Inputs.of()
        ours, theirs = (getattr(m.transformer, part)(x, inputs).array for m in (model, sequential))
        np.testing.assert_array_equal(ours, theirs)


def test_analyses_read_the_steps_of_the_flow():
    model = build(small_config("basis", "split", DepthConfig(steps=3)))
    reading, row = read(model), TOKENS["batch", 0]
    path = eqx.filter_jit(lambda m: m.trajectory(row))(model)
    x = model.embeddings(row)
    for k in range(3):
        grown = reading.increment(k, x)
        np.testing.assert_allclose(reading.field(k, x).array * reading.step, grown.array, atol=1e-6)
        x = x + grown
        np.testing.assert_allclose(x.array, path["layers", k].array, atol=1e-5)


def test_gradients_of_all_exact_adjoints_agree():
    """checkpoint = selective = direct = reversible, on the reversible scheme, for all parameters and x(0), float64."""
    found = []
    with jax.enable_x64(True):
        for adjoint in ("checkpoint", "selective", "direct", "reversible"):
            depth = DepthConfig(steps=3, adjoint=adjoint, coupling=0.99)
            model = build(small_config("basis", "split", depth))
            model = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64) if is_float(a) else a, model)
            params, static = eqx.partition(model.transformer.flow, eqx.is_inexact_array)

            @jax.jit
            @jax.grad
            def gradient(given, static=static):
                flow, x = eqx.combine(given[0], static), given[1]
                return hax.sum(hax.sin(flow(x, Inputs.of()))).array

            found.append(jax.tree.leaves(gradient((params, model.embeddings(TOKENS)))))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_steps_of_random_lengths_are_refused():
    with pytest.raises(UserError, match=r"split.*jitter.*steps: \{min: 3, max: 12\}"):
        small_config(form="split", depth=DepthConfig(time_sampling="jitter"))
