"""Laws of W(t) and of `at`: the formula, the axes, exact times, and where weights do not exist."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.nn.scan import Stacked
from support.models import WEIGHTS, build, small_config

from qkvflow.blocks import Gpt2Block, Gpt2BlockConfig
from qkvflow.errors import UserError
from qkvflow.time import GridPoint, grid, sinusoidal_features
from qkvflow.weights import GeneratedConfig, PerLayer, at, rate

Embed = Axis("embed", 16)
BLOCK = Gpt2BlockConfig(num_heads=2)
TIMES = tuple(k / 5 for k in range(1, 6))


def init_block(*, key):
    return BLOCK.init(Embed, key=key)


def block_of(weights, times=TIMES):
    config = WEIGHTS[weights] if isinstance(weights, str) else weights
    block = config.build(init_block, times, key=jax.random.PRNGKey(0))
    # Noise, so that leaves which start at zero count.
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.PRNGKey(x.size), x.shape) if eqx.is_inexact_array(x) else x,
        block,
    )


def arrays(module):
    return jax.tree.leaves(eqx.filter(module, eqx.is_array))


def test_sinusoidal_features_equal_the_official_ones():
    golden = np.load("tests/golden/sinusoid.npz")
    ours = sinusoidal_features(np.linspace(0.0, 1.0, 11), 8)
    # The official t are fp32: one ulp of t moves sin(1000 t) by 3e-5.
    np.testing.assert_allclose(ours.array, golden["embed_dim8"], atol=6e-5)
    exact = sinusoidal_features(golden["t"].astype(np.float64), 8)
    np.testing.assert_allclose(exact.array, golden["embed_dim8"], atol=6e-5)


def test_features_are_exact_fp32_however_the_time_is_given():
    times = [k / 93 for k in range(1, 94)]
    frequencies = 10_000.0 ** (-np.arange(16) / 16)
    angles = 1000 * np.asarray(times)[:, None] * frequencies
    exact = np.concatenate([np.asarray(times)[:, None], np.sin(angles), np.cos(angles)], axis=1)
    table = sinusoidal_features(grid(times), 16)
    assert table.dtype == jnp.float32
    np.testing.assert_allclose(table.array, exact, atol=6e-8)  # rounding of the result to fp32 alone
    picked = jax.jit(lambda i: sinusoidal_features(GridPoint(tuple(times), i), 16).array)
    for i in (0, 40, 92):
        np.testing.assert_array_equal(picked(i), table.array[i])
        np.testing.assert_array_equal(sinusoidal_features(times[i], 16).array, table.array[i])


def test_features_of_another_scale():
    """t, sin(pi t), cos(pi t)."""
    phi = sinusoidal_features(0.3, 1, np.pi).array
    np.testing.assert_allclose(phi, [0.3, np.sin(0.3 * np.pi), np.cos(0.3 * np.pi)], atol=6e-8)


@pytest.mark.parametrize("scale", [1000.0, 3.0])
def test_generated_weights_follow_the_formula(scale):
    block = block_of(dataclasses.replace(WEIGHTS["generated"], time_scale=scale))
    t = 0.3
    unit = block.attn.c_attn
    phi = np.asarray(sinusoidal_features(t, 4, scale).array, np.float64)

    def linear(m, x):
        return x @ np.asarray(m.weight.array, np.float64) + np.asarray(m.bias.array, np.float64)

    hidden = linear(unit.net.lin1, phi)
    e = linear(unit.net.lin2, hidden / (1 + np.exp(-hidden)))
    ours = at(block, t)
    assert isinstance(ours, Gpt2Block)
    weight = np.tensordot(e, unit.leaves.weight.projection.array, axes=1) + unit.leaves.weight.base.array
    np.testing.assert_allclose(ours.attn.c_attn.weight.array, weight, rtol=1e-5, atol=1e-6)
    bias = np.tensordot(e, unit.leaves.bias.projection.array, axes=1)
    np.testing.assert_allclose(ours.attn.c_attn.bias.array, bias, rtol=1e-5, atol=1e-6)
    norm = block.attn_ln
    hidden = linear(norm.net.lin1, phi)
    e = linear(norm.net.lin2, hidden / (1 + np.exp(-hidden)))
    gain = 1 + np.tensordot(e, norm.leaves.weight.projection.array, axes=1)
    np.testing.assert_allclose(ours.attn_ln.weight.array, gain, rtol=1e-5, atol=1e-6)


def test_every_module_has_its_own_time_network():
    block = block_of("generated")
    nets = [
        block.attn_ln,
        block.attn.c_attn,
        block.attn.c_proj,
        block.mlp_ln,
        block.mlp.c_fc,
        block.mlp.c_proj,
    ]
    first = [np.asarray(u.net.lin1.weight.array) for u in nets]
    assert all(not np.array_equal(a, b) for i, a in enumerate(first) for b in first[:i])


@pytest.mark.parametrize("weights", ["generated", "modulated", "constant", "per_layer"])
def test_at_a_grid_is_the_stack_of_at_its_times(weights):
    block = block_of(weights)
    stacked = at(block, grid(TIMES))
    for i, t in enumerate(TIMES):
        single, point = at(block, t), at(block, GridPoint(TIMES, jnp.asarray(i)))
        for row, one, picked in zip(arrays(stacked), arrays(single), arrays(point), strict=True):
            np.testing.assert_allclose(row[i], one, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(picked, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["generated", "modulated", "constant", "per_layer"])
def test_at_a_grid_has_the_leaf_axes_of_haliax_stacked(weights):
    Layers = Axis("layers", len(TIMES))

    class Init:
        @staticmethod
        def init(*, key):
            return init_block(key=key)

    reference = Stacked.init(Layers, Init)(key=jax.random.split(jax.random.PRNGKey(0), Layers.size)).stacked
    ours = at(block_of(weights), grid(TIMES))
    is_named = lambda x: isinstance(x, hax.NamedArray)  # noqa: E731
    a, b = (jax.tree_util.tree_leaves_with_path(m, is_leaf=is_named) for m in (ours, reference))
    assert [(p, getattr(x, "axes", x)) for p, x in a] == [(p, getattr(x, "axes", x)) for p, x in b]


def test_traced_times_agree_with_exact_ones_to_the_precision_of_fp32_time():
    block = block_of("generated")
    traced = jax.jit(lambda t: at(block, t).mlp.c_fc.weight.array)(jnp.float32(0.7))
    # 3e-5 is what one ulp of t moves sin(1000 t) by; the projections here are about 0.3.
    np.testing.assert_allclose(traced, at(block, 0.7).mlp.c_fc.weight.array, atol=3e-4)


@pytest.mark.parametrize("weights", ["generated", "modulated", "basis"])
def test_forward_mode_gives_the_rate(weights):
    """`jax.jvp` with respect to t and to the parameters, is the closed form, and W itself, which is linear in C."""
    module = build(small_config(weights)).transformer.flow.weights
    arrays, rest = eqx.partition(module, eqx.is_inexact_array)
    t, zero = jnp.float32(0.3), jax.tree.map(jnp.zeros_like, arrays)

    def read(arrays, t):
        return jax.tree.leaves(at(eqx.combine(arrays, rest), t).mlp.c_fc)

    found = jax.jvp(read, (arrays, t), (zero, jnp.ones_like(t)))[1]
    for a, b in zip(found, jax.tree.leaves(rate(module, t).mlp.c_fc), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max() + 1e-6))
    if weights == "basis":
        for a, b in zip(jax.jvp(read, (arrays, t), (arrays, 0 * t))[1], read(arrays, t), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_vector_of_jax_is_a_grid_of_traced_times():
    times = np.linspace(0, 1, 5, dtype=np.float32)
    module = build(small_config("basis")).transformer.flow.weights
    for read in (at, rate):
        expected, found = (read(module, t).mlp.c_fc.weight for t in (times, jnp.asarray(times)))
        assert found.axes == expected.axes
        np.testing.assert_allclose(found.array, expected.array, atol=1e-5)
    for wrong in (np.ones((2, 2)), jnp.ones((2, 2)), [[0.0, 1.0]], hax.ones((hax.Axis("a", 2), hax.Axis("b", 2)))):
        with pytest.raises(UserError, match="one number or a vector"):
            at(module, wrong)


@pytest.mark.parametrize("kind", ["generated", "basis", "constant"])
@pytest.mark.parametrize("t", [3, -0.1, 1.01, float("nan"), [0.5, 2.0]])
def test_times_outside_of_the_flow_are_refused(kind, t):
    """Such as the number of a layer: bases are zero there."""
    block = block_of(kind)
    for function in (at, rate):
        with pytest.raises(UserError, match="layer-time t is between 0 and 1"):
            function(block, t)
    at(block, np.nextafter(1.0, 2.0))  # a sum of steps


def test_per_layer_weights_exist_at_their_times_only():
    block = block_of("per_layer")
    assert isinstance(block, PerLayer)
    with pytest.raises(UserError, match=r"no value at t = 0\.5"):
        at(block, 0.5)
    with pytest.raises(UserError, match="known at run time"):
        at(block, jnp.float32(0.2))


def test_compute_dtype_does_not_touch_time():
    """bf16 parameters: the weights come out in bf16, and differ from fp32 by rounding, not by wrong times."""
    block = block_of("generated")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, block)
    w32, w16 = at(block, 0.9).mlp.c_fc.weight.array, at(low, 0.9).mlp.c_fc.weight.array
    assert w16.dtype == jnp.bfloat16
    assert float(jnp.abs(w16.astype(jnp.float32) - w32).max() / jnp.abs(w32).max()) < 0.03  # bf16 has 8 bits


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"time_embed_dim": 0}, "time_embed_dim"),
        ({"sinusoidal_dim": -1}, "sinusoidal_dim"),
        ({"init": "x"}, "official"),
        ({"frozen_time": 1.5}, "frozen_time"),
    ],
)
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        GeneratedConfig(**kwargs)


def test_frozen_time_leaves_the_adapter_and_takes_the_time():
    moving = block_of("generated")
    config = GeneratedConfig(time_embed_dim=6, sinusoidal_dim=4, frozen_time=0.5)
    frozen = config.build(init_block, TIMES, key=jax.random.PRNGKey(0))
    shapes = [[(x.shape, x.dtype) for x in arrays(block)] for block in (frozen, moving)]
    assert shapes[0] == shapes[1]
    frozen = jax.tree.unflatten(jax.tree.structure(frozen), jax.tree.leaves(moving))
    expected = at(moving, 0.5).mlp.c_fc.weight
    assert float(jnp.abs(at(moving, 0.9).mlp.c_fc.weight.array - expected.array).max()) > 1e-3
    for t in (0.1, jnp.asarray(0.9), GridPoint(TIMES, jnp.asarray(1))):
        np.testing.assert_allclose(at(frozen, t).mlp.c_fc.weight.array, expected.array, atol=1e-6)
    for t in (grid(TIMES), hax.named(jnp.asarray(TIMES), "layers")):
        stacked = at(frozen, t).mlp.c_fc.weight
        assert stacked.axes == (Axis("layers", 5), *expected.axes)
        np.testing.assert_allclose(stacked["layers", 4].array, expected.array, atol=1e-6)


def test_discretised_config_is_itself_a_config():
    config = small_config().at_depth(7)
    assert config.depth.steps == 7
    assert type(config.weights).__name__ == "PerLayerConfig"
