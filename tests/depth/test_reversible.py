"""Laws of the reversible scheme: exact gradients, constant memory, order of the base method, the walk back to x(0)."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.utils.tree_utils import inference_mode
from support.depth import ORDER, rotation, slope, times_of
from support.models import VOCAB, build, heavy, random_tokens, small_config

from qkvflow.blocks import Gpt2BlockConfig, Inputs
from qkvflow.depth import SOLVERS, DepthConfig
from qkvflow.depth.steps import forward
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import ConstantConfig

DROPOUT = Gpt2BlockConfig(num_heads=2, mlp_scale=2, resid_pdrop=0.2, attn_pdrop=0.2)


def reversible(solver="euler", steps=4, adjoint="reversible", **kwargs) -> DepthConfig:
    return DepthConfig(solver=solver, steps=steps, adjoint=adjoint, coupling=0.99, **kwargs)


def gradients(config, tokens, key=None, dtype=jnp.float32):
    """Loss, and its gradient by all parameters of the flow and by x(0)."""
    model = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, build(config))
    x = model.embeddings(tokens)
    params, static = eqx.partition(model.transformer.flow, eqx.is_inexact_array)

    @jax.jit
    def compute(params, x):
        return jax.value_and_grad(
            lambda p, x: hax.sum(hax.sin(eqx.combine(p, static)(x, Inputs.of(), key=key))).array, (0, 1)
        )(params, x)

    value, grads = compute(params, x)
    return value, jax.tree.leaves(grads)


def distance(ours, theirs) -> float:
    """The largest relative difference of an array, in the Euclidean norm."""

    def relative(a, b):
        a, b = a.astype(jnp.float64), b.astype(jnp.float64)
        return float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-3))

    with jax.enable_x64(True):
        return max(relative(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("weights", "solver", "evaluate", "dropout", "x64"),
    [
        ("generated", "euler", "batched", False, False),
        heavy("generated", "euler", "in_scan", True, False),
        heavy("generated", "rk4", "batched", True, True),
        heavy("constant", "bosh3", "auto", False, False),
        heavy("per_layer", "heun", "batched", False, True),
    ],
)
def test_gradients_are_those_of_plain_autodiff(weights, solver, evaluate, dropout, x64):
    """Through the same scheme, by all parameters and by x(0)."""
    block = {"block": DROPOUT} if dropout else {}
    with jax.enable_x64(x64):
        key = jax.random.PRNGKey(5) if dropout else None
        (a, ours), (b, plain) = (
            gradients(
                small_config(weights, depth=reversible(solver, 4, adjoint, evaluate=evaluate), **block),
                random_tokens(),
                key,
                jnp.float64 if x64 else jnp.float32,
            )
            for adjoint in ("reversible", "checkpoint")
        )
    assert float(a) == pytest.approx(float(b), rel=1e-12 if x64 else 1e-6)
    # Sums in another order, and states found again up to rounding: the rounding of fp64 (1e-16) and of fp32 (6e-8),
    # times what the flow makes of it, about 100.
    assert distance(ours, plain) < (1e-12 if x64 else 1e-5)


@pytest.mark.slow
def test_gradients_in_bf16(tokens):
    """The pair stays in fp32, so walking back costs nothing that bf16 does not cost anyway."""
    (_, ours), (_, plain), (_, exact) = (
        gradients(small_config(depth=reversible("euler", 4, adjoint)), tokens, dtype=dtype)
        for adjoint, dtype in (("reversible", jnp.bfloat16), ("checkpoint", jnp.bfloat16), ("checkpoint", jnp.float32))
    )
    assert distance(ours, exact) < 1.5 * distance(plain, exact)


@pytest.mark.slow
def test_gradients_against_finite_differences():
    """Float64, along a random direction of all parameters and the input."""
    with jax.enable_x64(True):
        tokens = random_tokens(batch=1, length=5)
        model = build(small_config(depth=reversible("heun", 3)))
        model = jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, model)
        x = model.embeddings(tokens)
        params, static = eqx.partition(model.transformer.flow, eqx.is_inexact_array)

        @jax.jit
        def loss(params, x):
            return hax.sum(hax.sin(eqx.combine(params, static)(x, Inputs.of()))).array

        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), (params, x))
        along = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
        h = 1e-6
        plus, minus = (jax.tree.map(lambda a, d, s=s: a + s * h * d, (params, x), direction) for s in (1, -1))
        assert float(along) == pytest.approx(float((loss(*plus) - loss(*minus)) / (2 * h)), rel=1e-6)


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "dopri8"])
def test_order_is_that_of_the_solver(solver):
    """Against the exact solution, as in test_depth.

    With the usual coupling 0.99 and this few steps the scheme is nearly symmetric in time and gains up to one order;
    a coupling of 0.5 shows what it does in the limit.
    """
    order = ORDER[solver]
    with jax.enable_x64(True):
        field, x0 = rotation(1.0)
        reference = DepthConfig(solver="dopri8", steps=400).plan("in_scan").solve(field, times_of, None, x0).end.array
        steps = {1: (256, 512, 1024), 3: (64, 128, 256), 5: (72, 96, 128)}.get(order, (32, 48, 64))
        found = slope(field, x0, reference, solver, steps, adjoint="reversible", coupling=0.5)
        assert found == pytest.approx(order, abs=0.2), found


def deep_model(steps: int, **depth) -> NeuralOdeConfig:
    block = Gpt2BlockConfig(num_heads=4)
    return NeuralOdeConfig(
        max_seq_len=128, hidden_dim=128, block=block, weights=ConstantConfig(), depth=DepthConfig(steps=steps, **depth)
    )


def temporary_bytes(config) -> int:
    """XLA's temporary memory of loss and gradient, batch 4, sequence 128."""
    tokens = random_tokens(batch=4, length=128)
    model = eqx.filter_eval_shape(lambda: config.build(VOCAB, key=jax.random.PRNGKey(0)))
    params, static = eqx.partition(model, lambda a: isinstance(a, jax.ShapeDtypeStruct) and a.dtype == jnp.float32)

    def loss(params):
        return hax.sum(hax.square(eqx.combine(params, static).activations(tokens))).array

    return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_number_of_steps():
    few, many = (temporary_bytes(deep_model(n, adjoint="reversible")) for n in (8, 64))
    assert many <= 1.10 * few
    # The test can fail: `checkpoint` stores a state per step.
    few, many = (temporary_bytes(deep_model(n, adjoint="checkpoint")) for n in (8, 64))
    assert many > 2 * few


def test_walking_back_finds_the_start():
    """x(0) from the last pair after 64 steps, in fp32, to 1e-4."""
    model = build(deep_model(64, adjoint="reversible"))
    x = model.embeddings(random_tokens(batch=1, length=32))
    field = model.transformer.flow.weights
    coupling, h = 0.99, 1 / 64

    @jax.jit
    def there_and_back(x):
        def psi(x, backward):
            return field(x, Inputs.of()) * (-h if backward else h)

        pair, _ = jax.lax.scan(lambda pair, _: (forward(psi, pair, coupling), None), (x, x), None, length=64)

        def back(pair, _):
            y, z = pair
            z = z + psi(y, True)
            return ((y - z * (1 - coupling) - psi(z, False)) * (1 / coupling), z), None

        return pair, jax.lax.scan(back, pair, None, length=64)[0]

    (y, _), start = there_and_back(x)
    scale = float(jnp.abs(y.array).max())  # rounding is relative to the states on the way
    assert float(jnp.abs(y.array - x.array).max()) > 0.1  # it went somewhere
    np.testing.assert_allclose(y.array, model.transformer.flow(x, Inputs.of()).array, atol=1e-4)
    for found in start:
        assert float(jnp.abs(found.array - x.array).max()) < 1e-4 * max(1.0, scale)


@pytest.mark.parametrize("solver", ["euler", heavy("midpoint"), heavy("bosh3")])
def test_discretised_keeps_the_scheme(solver, tokens):
    model = build(small_config(depth=reversible(solver, 4)))
    run = eqx.filter_jit(lambda m: m(tokens).array)
    np.testing.assert_allclose(run(model.discretise()), run(model), atol=1e-5)
    assert model.config.plan.evaluations == 2 * 4 * {"euler": 1, "midpoint": 2, "bosh3": 3}[solver]
    plain = build(small_config(depth=DepthConfig(solver=solver, steps=4)))
    assert float(np.abs(run(plain) - run(model)).max()) > 1e-5  # and the scheme is another function


def test_trajectory_ends_at_x1(tokens):
    model = inference_mode(build(small_config(depth=reversible(steps=5))), True)
    states = model.trajectory(tokens)
    assert states.resolve_axis("layers") == Axis("layers", 5)
    x = model.transformer.flow(model.embeddings(tokens), Inputs.of())
    np.testing.assert_allclose(states["layers", 4].array, x.array, atol=1e-6)
