"""Laws of the general path: adaptive steps and the continuous adjoint, their statistics, their limits."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import LmExample
from support.models import VOCAB, WEIGHTS, build, change, random_tokens, small_config

from qkvflow.blocks import Gpt2BlockConfig, Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig
from qkvflow.models.metrics import penalised

INPUTS = Inputs.of()


def smooth_config(**depth):
    """Constant weights and an input that moves with t: a field that depends on time, smoothly."""
    return small_config("constant", depth=DepthConfig(**depth), control=ControlConfig(dim=2, alpha=1.0))


def start(tokens):
    """x(0) ~ N(0, 1). Where the state is small its norm layers make the field stiff, and steps must be short."""
    return hax.random.normal(jax.random.PRNGKey(3), (*tokens.axes, hax.Axis("embed", 16)))


def in_float64(config):
    model = build(config)
    return jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, model)


def gradients(model, tokens):
    x = start(tokens).astype(jnp.float64)
    params, static = eqx.partition(model.transformer.flow, eqx.is_inexact_array)

    @jax.jit
    def compute(params, x):
        return jax.grad(lambda p, x: hax.sum(hax.sin(eqx.combine(p, static)(x, INPUTS))).array, (0, 1))(params, x)

    return jax.tree.leaves(compute(params, x))


def distance(ours, theirs) -> float:
    """Relative, in the Euclidean norm over all arrays."""
    both = [a - b for a, b in zip(ours, theirs, strict=True)], theirs
    difference, size = (jnp.sqrt(sum(jnp.sum(v**2) for v in vs)) for vs in both)
    return float(difference / size)


@pytest.mark.parametrize("solver", [pytest.param("bosh3", marks=pytest.mark.slow), "tsit5"])
def test_adaptive_steps_find_the_solution(solver, tokens):
    fine = build(smooth_config(solver="rk4", steps=32))
    adaptive = build(smooth_config(solver=solver, rtol=1e-5, atol=1e-5, max_steps=64))
    x = start(tokens)
    reference = eqx.filter_jit(fine.transformer.flow)(x, INPUTS)
    found = eqx.filter_jit(adaptive.transformer.flow)(x, INPUTS)
    assert float(jnp.abs(reference.array - x.array).max()) > 0.3  # the flow moves its state
    np.testing.assert_allclose(found.array, reference.array, atol=3e-4)  # some tens of steps, each to 1e-5


@pytest.mark.slow
def test_adaptive_gradients_are_those_of_the_solution():
    """Against a fine fixed grid, fp64, by all parameters and x(0): none is lost in a closure."""
    with jax.enable_x64(True):
        tokens = random_tokens(length=6)
        reference = gradients(in_float64(smooth_config(solver="rk4", steps=32)), tokens)
        tolerances = {"solver": "tsit5", "rtol": 1e-7, "atol": 1e-7, "max_steps": 64}
        assert distance(gradients(in_float64(smooth_config(**tolerances)), tokens), reference) < 1e-5
        backsolve = gradients(in_float64(smooth_config(adjoint="backsolve", **tolerances)), tokens)
        assert distance(backsolve, reference) < 1e-5


@pytest.mark.slow
def test_max_steps_do_not_cut_the_solve_backwards():
    """It may need more steps than the one forwards; cut, it would give a wrong gradient without a word."""
    with jax.enable_x64(True):
        tokens = random_tokens(length=6)
        tolerances = {"solver": "tsit5", "rtol": 1e-6, "atol": 1e-6, "adjoint": "backsolve"}
        model = in_float64(smooth_config(**tolerances))
        x = start(tokens).astype(jnp.float64)
        steps = int(eqx.filter_jit(lambda m, x: m.transformer.flow.solve(x, INPUTS).statistics)(model, x).steps)
        least = gradients(in_float64(smooth_config(max_steps=steps, **tolerances)), tokens)
        assert distance(least, gradients(model, tokens)) == 0.0


@pytest.mark.parametrize("options", [{"solver": "euler", "endpoint": "left"}, {"solver": "heun"}, {"solver": "rk4"}])
def test_the_times_of_backsolve_are_those_at_which_it_evaluates_the_field(options):
    plan = DepthConfig(steps=4, adjoint="backsolve", **options).plan("in_scan")
    seen = set()

    def field(t, x, args, key):
        jax.debug.callback(lambda t: seen.add(float(t)), t, ordered=False)
        return x * 0.0

    x = hax.ones(hax.Axis("embed", 2))
    states = plan.solve(field, lambda params, t: t, None, x, trajectory=True).states
    jax.effects_barrier()
    assert sorted(seen) == pytest.approx(sorted(plan.times))
    assert states.axis_size("layers") == 4


@pytest.mark.slow
def test_backsolve_forward_is_the_fixed_grid(tokens):
    for options in ({"solver": "heun"}, {"solver": "tsit5"}, {"solver": "euler", "endpoint": "left"}):
        models = [build(smooth_config(steps=4, adjoint=a, **options)) for a in ("backsolve", "checkpoint")]
        a, b = (eqx.filter_jit(m)(tokens).array for m in models)
        np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(eqx.filter_jit(models[0].discretise())(tokens).array, b, atol=1e-5)


@pytest.mark.slow
def test_error_of_backsolve_falls_at_the_order_of_the_solver(record_property):
    """Its gradient is that of the solution, up to the error of solving backwards; it is not that of the steps made."""
    with jax.enable_x64(True):
        tokens = random_tokens(length=6)
        exact = gradients(in_float64(smooth_config(solver="rk4", steps=48)), tokens)
        steps = (8, 16, 32)
        errors = [
            distance(
                gradients(in_float64(smooth_config(solver="midpoint", steps=n, adjoint="backsolve")), tokens), exact
            )
            for n in steps
        ]
    record_property("relative error of the gradient at 8, 16, 32 steps", errors)
    order = np.polyfit(np.log(1 / np.asarray(steps)), np.log(errors), 1)[0]
    assert order == pytest.approx(2.0, abs=0.25), errors


@pytest.mark.parametrize("solver", ["heun", "bosh3", "tsit5", "dopri5", "dopri8"])
def test_statistics_count_what_is_evaluated(solver):
    """Evaluations of the field, counted one by one while it runs; some steps are rejected."""
    count = []

    def field(t, x, args, key):
        jax.debug.callback(lambda: count.append(1))
        return hax.cos(40 * t * t) * 20 + x

    plan = DepthConfig(solver=solver, steps=50, rtol=1e-4, max_steps=1000).plan("in_scan")
    x = hax.zeros(hax.Axis("embed", 2))
    statistics = plan.solve(field, lambda params, t: hax.named(t, ()), None, x).statistics
    jax.effects_barrier()
    assert int(statistics.rejected) > 0
    assert bool(statistics.successful)
    assert len(count) == int(statistics.evaluations)


def test_hitting_max_steps_is_an_error_and_nan_inside_jit(tokens):
    model = build(smooth_config(solver="tsit5", rtol=1e-6, max_steps=2))
    x = model.embeddings(tokens)
    with pytest.raises(UserError, match="max_steps"):
        model.transformer.flow(x, INPUTS)
    with pytest.raises(UserError, match="max_steps"):
        model(tokens)
    assert bool(jnp.isnan(eqx.filter_jit(model)(tokens).array).any())
    statistics = eqx.filter_jit(lambda m, x: m.transformer.flow.solve(x, INPUTS).statistics)(model, x)
    assert not bool(statistics.successful)
    assert int(statistics.steps) == 2


def test_statistics_of_a_training_step(tokens):
    model = build(smooth_config(solver="tsit5", rtol=1e-3))
    example = LmExample.causal(tokens["batch", 0])
    loss, solution = eqx.filter_jit(lambda m: m.next_token_loss(example))(model)
    assert float(loss.array) == pytest.approx(float(model.compute_next_token_loss(example).scalar()), rel=1e-6)
    assert int(solution.statistics.evaluations) >= 12
    logged = penalised(model, loss, solution)[1]
    assert set(logged) == {"depth_steps", "depth_evaluations", "depth_rejected_steps"}
    accepted = int(solution.statistics.steps - solution.statistics.rejected)
    assert float(logged["depth_steps"].value()) == accepted
    model = build(small_config())
    loss, fixed = model.next_token_loss(example)
    assert fixed.statistics is None
    assert penalised(model, loss, fixed) == (loss, {})


def test_adaptive_steps_are_not_causal():
    """The warning of docs/depth.md: the last token changes the step sizes, and by them what was before it.

    The change is of the size of the tolerance; on a fixed grid it is exactly zero.
    """
    tokens = random_tokens()
    other = change(tokens, 11)

    def difference(depth):
        run = eqx.filter_jit(build(small_config("constant", depth=depth)))
        return float(jnp.abs(run(tokens).array[:, :11] - run(other).array[:, :11]).max())

    assert difference(DepthConfig(solver="tsit5", steps=4)) == 0.0
    assert 0.0 < difference(DepthConfig(solver="tsit5", steps=4, rtol=1e-3)) < 0.1


def test_bf16_state(tokens):
    model = build(smooth_config(solver="bosh3", rtol=1e-2))
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, model)
    logits = eqx.filter_jit(low)(tokens)
    assert logits.dtype == jnp.bfloat16
    reference = eqx.filter_jit(model)(tokens).array
    assert float(jnp.abs(logits.array - reference).max() / jnp.abs(reference).max()) < 0.05  # 8 bits, some operations


def test_trajectory_is_read_on_the_grid(tokens):
    x = start(tokens)

    def states(**depth):
        flow = build(smooth_config(**depth)).transformer.flow
        return eqx.filter_jit(lambda flow: flow.solve(x, INPUTS, trajectory=True))(flow)

    solution = states(solver="tsit5", steps=4, rtol=1e-6)
    x1, adaptive = solution.end, solution.states
    assert adaptive.axes[0].name == "layers"
    np.testing.assert_array_equal(x1.array, adaptive.array[-1])
    # diffrax interpolates between the ends of its steps, at a lower order than that of the steps
    np.testing.assert_allclose(adaptive.array, states(solver="rk4", steps=32).states.array[7::8], atol=1e-3)


def test_dropout_is_drawn_once_per_solve(tokens):
    """So that the field is a function: the same key gives the same result, another key another."""
    block = Gpt2BlockConfig(num_heads=2, mlp_scale=2, resid_pdrop=0.3)
    model = build(small_config("constant", depth=DepthConfig(solver="tsit5", rtol=1e-3), block=block))
    run = eqx.filter_jit(lambda m, key: m(tokens, key=key).array)
    a, again, b = (run(model, jax.random.PRNGKey(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(a, again)
    assert np.isfinite(a).all()
    assert not np.array_equal(a, b)


def test_discretise_needs_a_number_of_steps(tokens):
    model = build(smooth_config(solver="tsit5", rtol=1e-5))
    with pytest.raises(UserError, match=r"discretise\(steps\)"):
        model.discretise()
    discrete = model.discretise(6)
    assert discrete.config.plan.evaluations == 36
    x = start(tokens)
    a, b = (eqx.filter_jit(m.transformer.flow)(x, INPUTS).array for m in (discrete, model))
    np.testing.assert_allclose(a, b, atol=1e-3)
    assert model.config.flops_per_token(VOCAB.size, 12) is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rtol": 1e-3}, "euler does not estimate its error"),
        ({"solver": "rk4", "atol": 1e-3}, "rk4 does not estimate its error"),
        ({"solver": "tsit5", "rtol": -1.0}, "`rtol` must be above 0"),
        ({"solver": "tsit5", "rtol": 1e-3, "max_steps": 0}, "`max_steps` must be at least 1"),
        ({"solver": "tsit5", "max_steps": 10}, "this grid is fixed"),
        ({"solver": "tsit5", "rtol": 1e-3, "endpoint": "left"}, "do not use it"),
        ({"solver": "tsit5", "rtol": 1e-3, "adjoint": "reversible"}, "steps back along a fixed grid"),
        ({"solver": "tsit5", "rtol": 1e-3, "adjoint": "selective"}, "keeps products for each step of a fixed grid"),
        ({"solver": "tsit5", "rtol": 1e-3, "evaluate": "batched"}, "times that are known in advance"),
        ({"solver": "tsit5", "rtol": 1e-3, "time_sampling": "jitter"}, "combined with random steps"),
        ({"solver": "tsit5", "rtol": 1e-3, "coupling": 0.9}, "no effect with tolerances"),
        ({"adjoint": "backsolve"}, "endpoint: left"),
        ({"adjoint": "backsolve", "endpoint": "left", "step_size": "residual"}, "steps of length 1"),
        ({"adjoint": "reversible", "coupling": 0.0}, r"coupling must lie in \(0, 1\]"),
    ],
)
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        DepthConfig(**kwargs)


@pytest.mark.parametrize("depth", [{"solver": "tsit5", "rtol": 1e-3}, {"solver": "heun", "adjoint": "backsolve"}])
def test_weights_of_one_grid_are_refused(depth):
    with pytest.raises(UserError, match="functions of time"):
        small_config("per_layer", depth=DepthConfig(**depth))


@pytest.mark.parametrize("name", ["resid_pdrop", "attn_pdrop"])
def test_backsolve_with_dropout_is_refused(name):
    with pytest.raises(UserError, match=f"block.{name}: 0.0"):
        small_config(
            depth=DepthConfig(solver="heun", adjoint="backsolve"), block=Gpt2BlockConfig(num_heads=2, **{name: 0.1})
        )


def test_generated_weights_at_times_known_at_run_time(tokens):
    """A GridPoint and a traced time give the same weights, up to the rounding of t: 3e-5 in sin(1000 t)."""
    model = build(small_config(WEIGHTS["generated"], depth=DepthConfig(solver="heun", steps=4, adjoint="backsolve")))
    exact = build(small_config(WEIGHTS["generated"], depth=DepthConfig(solver="heun", steps=4)))
    np.testing.assert_allclose(eqx.filter_jit(model)(tokens).array, eqx.filter_jit(exact)(tokens).array, atol=1e-3)
