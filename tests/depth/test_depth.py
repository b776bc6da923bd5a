"""Laws of integration: order of convergence, equality with diffrax, exact gradients, one set of times for all."""

import diffrax
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.utils.tree_utils import inference_mode
from support.depth import ORDER, Embed, plan, rotation, slope, times_of
from support.models import VOCAB, build, heavy, random_tokens, small_config

from qkvflow.blocks import Inputs
from qkvflow.depth import SOLVERS, DepthConfig, solver_by_name, tableau
from qkvflow.errors import UserError


def test_order_of_convergence():
    """dx/dt = (A + t B) x with non-commuting skew A, B (rotations, so that errors are not amplified), in float64.

    The slope of log error against log step is the order. dopri8 is left with its own test: its errors reach rounding.
    """
    with jax.enable_x64(True):
        field, x0 = rotation(1.0)
        reference = plan("dopri8", 400).solve(field, times_of, None, x0).end.array
        for solver, order in ORDER.items():
            steps = {1: (128, 256, 512), 5: (24, 32, 48), 8: None}.get(order, (32, 48, 64))
            if steps is not None:
                assert slope(field, x0, reference, solver, steps) == pytest.approx(order, abs=0.15), solver


def test_order_of_dopri8_is_at_least_8():
    with jax.enable_x64(True):
        field, x0 = rotation(2.0)
        reference = plan("dopri8", 400).solve(field, times_of, None, x0).end.array
        assert slope(field, x0, reference, "dopri8", (12, 16, 24)) > 7.8


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_fixed_grid_equals_diffrax(solver):
    """The same steps as diffrax's own loop takes (`left` end points for Euler, as in diffrax)."""
    rng = np.random.default_rng(1)
    a = jnp.asarray(rng.normal(size=(4, 4)).astype(np.float32))
    x0 = jnp.asarray(rng.normal(size=4).astype(np.float32))

    def vector_field(t, x, args):
        return jnp.tanh(a @ x + t)

    reference = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field), solver_by_name(solver), 0.0, 1.0, dt0=0.125, y0=x0
    ).ys[0]

    def field(t, x, args, key):
        return hax.named(vector_field(t.array, x.array, None), "embed")

    ours = plan(solver, 8, endpoint="left").solve(field, times_of, None, hax.named(x0, Embed)).end
    np.testing.assert_allclose(ours.array, reference, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("solver", ["euler", "rk4", "bosh3", "dopri8"])
def test_batched_and_in_scan_see_the_same_times(solver):
    def field(t, x, args, key):
        return x * hax.sin(9 * t)

    x0 = hax.ones(Embed)
    a, b = (plan(solver, 5, evaluate=e).solve(field, times_of, None, x0).end for e in ("batched", "in_scan"))
    np.testing.assert_array_equal(a.array, b.array)


@pytest.mark.parametrize(
    ("endpoint", "expected"), [("right", [0.25, 0.5, 0.75, 1.0]), ("left", [0.0, 0.25, 0.5, 0.75])]
)
def test_end_points(endpoint, expected):
    assert plan(endpoint=endpoint).times == tuple(expected)


def test_times_of_methods_with_stages():
    assert plan("rk4", 2).times == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert plan("rk4", 2).grid.time_rows == ((0, 1, 2), (2, 3, 4))
    assert plan("rk4", 3).evaluations == 12
    # dopri5 has 7 stages; the last serves the next step (FSAL) and the error estimate, which a fixed grid has not.
    assert tableau(solver_by_name("dopri5")).stages == 6
    assert tableau(solver_by_name("tsit5")).stages == 6
    assert tableau(solver_by_name("bosh3")).stages == 3


def test_every_number_of_steps_gives_as_many_blocks():
    """int(1 / (1/n)) loses a block for n = 93, 99, 105, ...; steps here are integers."""
    model = eqx.filter_eval_shape(lambda: small_config().build(VOCAB, key=jax.random.PRNGKey(0)))
    for n in (*range(1, 30), 49, 93, 98, 99, 105, 107, 186, 198):
        discrete = eqx.filter_eval_shape(lambda m, n=n: m.discretise(n), model)
        blocks = discrete.transformer.blocks
        assert blocks.Block.size == n
        assert blocks.stacked.mlp.c_fc.weight.resolve_axis("layers").size == n
        assert discrete.transformer.flow.plan.times == tuple(k / n for k in range(1, n + 1))


@pytest.mark.parametrize("solver", ["euler", heavy("midpoint"), heavy("heun"), heavy("rk4")])
@pytest.mark.parametrize("form", ["parallel", "sequential"])
def test_discretised_at_the_trained_depth_is_the_same_function(solver, form, tokens):
    model = build(small_config(form=form, depth=DepthConfig(solver=solver, steps=4), prelude_layers=1, coda_layers=1))
    run = eqx.filter_jit(lambda m: m(tokens).array)
    np.testing.assert_allclose(run(model.discretise()), run(model), atol=1e-5)
    assert float(np.abs(run(model.discretise(8)) - run(model)).max()) > 1e-4  # another depth is another function


def _gradients(config, tokens):
    model = build(config)

    def loss(model, x):
        y = model.transformer(x, Inputs.of())
        return hax.sum(hax.sin(3 * y)).array

    x = model.embeddings(tokens)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    grads = jax.jit(jax.grad(lambda p, x: loss(eqx.combine(p, static), x), argnums=(0, 1)))(params, x)
    return jax.tree.leaves(grads)


@pytest.mark.parametrize("solver", ["euler", pytest.param("rk4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["generated", heavy("per_layer"), heavy("constant")])
def test_gradients_do_not_depend_on_adjoint_or_evaluation(solver, weights, tokens):
    """checkpoint = selective = direct, batched = in_scan, for every parameter and for the input."""
    grads = []
    ways = [("checkpoint", "batched"), ("checkpoint", "in_scan"), ("selective", "batched"), ("selective", "in_scan")]
    for adjoint, evaluate in (("direct", "batched"), *ways):
        depth = DepthConfig(solver=solver, steps=3, adjoint=adjoint, evaluate=evaluate)
        grads.append(_gradients(small_config(weights=weights, depth=depth), tokens))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            # fp32 sums in another order; the largest entries set the scale
            assert float(jnp.abs(a - b).max()) <= 1e-5 * max(1.0, float(jnp.abs(a).max()))


@pytest.mark.slow
def test_gradients_against_finite_differences():
    """Float64, along random directions: parameters and input."""
    with jax.enable_x64(True):
        tokens = random_tokens(batch=1, length=5)
        model = build(small_config(depth=DepthConfig(solver="rk4", steps=2)))
        model = jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        x = model.embeddings(tokens)

        @jax.jit
        def loss(params, x):
            return hax.sum(hax.sin(eqx.combine(params, static).transformer(x, Inputs.of()))).array

        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), (params, x))
        slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
        h = 1e-6
        plus, minus = (jax.tree.map(lambda a, d, s=s: a + s * h * d, (params, x), direction) for s in (1, -1))
        numeric = (loss(*plus) - loss(*minus)) / (2 * h)
        assert float(slope) == pytest.approx(float(numeric), rel=1e-6)


def test_trajectory_ends_at_x1_and_has_every_step(tokens):
    model = build(small_config(depth=DepthConfig(steps=5), coda_layers=1))
    states = model.trajectory(tokens)
    assert [a.name for a in states.axes] == ["layers", "batch", "position", "embed"]
    x = model.embeddings(tokens)
    np.testing.assert_allclose(
        model.transformer.flow(x, Inputs.of()).array,
        states["layers", 4].array,
        rtol=1e-5,
        atol=1e-6,
    )
    coda = model.transformer.coda(states["layers", 4], Inputs.of())
    np.testing.assert_allclose(model.transformer.norm(coda).array, model.activations(tokens).array, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"solver": "eular"}, "Choices: euler"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"steps": -3}, "but is -3"),
        ({"endpoint": "middle"}, "right, left"),
        ({"adjoint": "magic"}, "checkpoint"),
        ({"evaluate": "never"}, "in_scan"),
        ({"solver": "rk4", "step_size": "residual"}, "4 stages"),
    ],
)
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        DepthConfig(**kwargs)


def test_implicit_solvers_are_refused():
    with pytest.raises(UserError, match="not an explicit Runge-Kutta"):
        tableau(diffrax.Kvaerno3())


@pytest.mark.parametrize("changes", [{}, {"solver": "heun"}, {"adjoint": "direct"}, {"time_sampling": "jitter"}])
def test_kinetic_energy(changes, tokens):
    """The sum over steps of the mean square of the motion, over the length of the step; with its gradient."""
    model = build(small_config(depth=DepthConfig(steps=3, kinetic_weight=1.0, **changes)))
    flow, x = model.transformer.flow, model.embeddings(tokens)
    key = jax.random.PRNGKey(3)
    kinetic = eqx.filter_jit(lambda flow, x: flow.solve(x, Inputs.of(), key=key).kinetic)
    found = float(kinetic(flow, x))
    if "time_sampling" in changes:
        assert found > 0  # times are drawn inside; the fixed grid is the law
    else:
        states = flow.solve(x, Inputs.of(), key=key, trajectory=True).states.array
        moves = np.diff(np.concatenate([np.asarray(x.array)[None], np.asarray(states)]), axis=0)
        assert found == pytest.approx(float(np.sum(np.mean(moves**2, axis=(1, 2, 3)) * 3)), rel=1e-5)
    slope = jax.grad(lambda s: kinetic(flow, x * s))(1.0)
    h = 1e-2
    assert float(slope) == pytest.approx(
        (float(kinetic(flow, x * (1 + h))) - float(kinetic(flow, x * (1 - h)))) / (2 * h), rel=1e-2
    )
    assert inference_mode(flow, True).solve(x, Inputs.of(), key=key).kinetic is None
