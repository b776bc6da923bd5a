"""From layers to a flow: the fit, the alignment, and a trained model that stays what it is."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from support.models import VOCAB, build, heavy, is_float, llama, random_tokens, small_config

from qkvflow.blocks import SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig
from qkvflow.models.alignment import align, layer_roughness
from qkvflow.models.levanter_twin import enter
from qkvflow.models.lifting import aligned, check_liftable, lift
from qkvflow.named import map_named, named_leaves
from qkvflow.time import grid
from qkvflow.weights import BasisConfig, FunctionBasis, GeneratedConfig, at, fit
from qkvflow.weights.bases import BASES

RESIDUAL = DepthConfig(steps=6, step_size="residual")
GROUPED = llama("sequential", num_heads=4, num_kv_heads=2)  # two groups of two heads


def layered(block=None, depth=RESIDUAL, **kwargs):
    options = {"form": "sequential"} if block is None else {"block": block}
    return small_config("per_layer", depth=depth, **options, **kwargs)


def stack_of(model):
    return model.transformer.flow.weights


def arrays(module):
    return {".".join(key.name for key in path): np.asarray(a.array) for path, a in named_leaves(module)}


@pytest.mark.parametrize("name", BASES)
def test_as_many_functions_as_layers_pass_through_them(name):
    layers = stack_of(build(layered()))
    found = fit(layers, FunctionBasis(name, 6))
    read, given = arrays(at(found.weights, grid(layers.times))), arrays(layers.blocks.stacked)
    assert read.keys() == given.keys() == found.errors.keys()
    bound = 0.0 if name == "piecewise" else 4 * found.condition * np.finfo(np.float32).eps
    assert bound < 1e-3
    for key in read:
        assert np.abs(read[key] - given[key]).max() <= bound * np.abs(given[key]).max(), key
    assert found.error <= bound


@pytest.mark.parametrize("name", BASES)
def test_fewer_functions_are_the_nearest(name):
    """What is left is orthogonal to every function, and as large as the fit says."""
    layers = stack_of(build(layered()))
    found = fit(layers, FunctionBasis(name, 3))
    phi = FunctionBasis(name, 3).values(np.asarray(layers.times))
    read, given = arrays(at(found.weights, grid(layers.times))), arrays(layers.blocks.stacked)
    for key in read:
        left = np.tensordot(phi.T, read[key].astype(np.float64) - given[key], 1)
        assert np.abs(left).max() <= 1e-5 * np.abs(given[key]).max(), key
        expected = np.linalg.norm(read[key] - given[key]) / np.linalg.norm(given[key])
        assert found.errors[key] == pytest.approx(expected, rel=1e-4)
    wrong = sum(np.sum((read[key] - given[key]) ** 2) for key in read)
    assert found.error == pytest.approx((wrong / sum(np.sum(a**2) for a in given.values())) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("endpoint", ["right", "left"])
@pytest.mark.parametrize("name", BASES)
def test_a_flow_is_found_again_from_its_layers(name, endpoint):
    config = small_config(BasisConfig(name, 3), depth=DepthConfig(steps=6, endpoint=endpoint))
    flow = build(config)
    again, found = lift(flow.discretise(), config.weights)
    assert again.config == config
    assert jax.tree.structure(again) == jax.tree.structure(flow)
    assert found.error < 1e-6
    for a, b in zip(*(filter(eqx.is_array, jax.tree.leaves(stack_of(m))) for m in (again, flow)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@functools.cache
def trained():
    """A GPT-2 of 6 layers after 40 steps on one batch, and that batch."""
    model = layered().build(VOCAB, key=jax.random.PRNGKey(0))
    tokens = random_tokens(batch=4)
    example = LmExample(tokens, hax.ones(tokens.axes), AttentionMask.causal())
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def train(model, state):
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, example)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(40):
        model, state, loss = train(model, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1
    return model, example


def loss_of(model, example):
    return hax.mean(model.compute_next_token_loss(example)).array


@pytest.mark.parametrize("name", ["cosine", "piecewise", heavy("chebyshev"), heavy("linear"), heavy("spline")])
def test_a_trained_model_stays_what_it_is(name):
    """With as many functions as layers, aligned or not."""
    model, example = trained()
    measured = eqx.filter_jit(loss_of)
    expected = float(measured(model, example))
    for layers in (model, aligned(model)):
        flow, _ = lift(layers, BasisConfig(name, 6))
        assert float(measured(flow, example)) == pytest.approx(expected, abs=1e-4)


def test_alignment_changes_no_logits():
    model, example = trained()
    logits = eqx.filter_jit(lambda m: m(example.tokens).array)
    ordered = aligned(model)
    before, after = (np.asarray(logits(m)) for m in (model, ordered))
    np.testing.assert_allclose(after, before, atol=2e-5)
    first, second = (layer_roughness(stack_of(m)) for m in (model, ordered))
    assert second.all < first.all
    assert second.by_array["attn_ln.weight"] == first.by_array["attn_ln.weight"]


def orders_of(draw, *shape):
    """[6, *shape]: of the last axis, at random; the first layer stays."""
    first = np.broadcast_to(np.arange(shape[-1]), (1, *shape))
    return np.concatenate([first, draw.permuted(np.repeat(first, 5, 0), axis=-1)])


def shuffled_gpt2(draw):
    """What each array goes through, told by axis and order: [layers, ..., the axis, ...]."""
    units, heads = orders_of(draw, 32), orders_of(draw, 2)
    keys, values = orders_of(draw, 2, 8), orders_of(draw, 2, 8)
    channels = np.stack([keys, keys, values], 1)
    return {
        "mlp.c_fc.weight": [(2, units[:, None])],  # layers, embed, mlp
        "mlp.c_fc.bias": [(1, units)],
        "mlp.c_proj.weight": [(1, units[..., None])],
        # layers, embed, qkv, heads, head_size
        "attn.c_attn.weight": [(4, channels[:, None]), (3, heads[:, None, None, :, None])],
        "attn.c_attn.bias": [(3, channels), (2, heads[:, None, :, None])],
        "attn.c_proj.weight": [(2, values[..., None]), (1, heads[..., None, None])],
    }


def shuffled_llama(draw):
    """Groups, queries within their group, and channels of values: rotary positions hold those of queries and keys."""
    units, groups, inside = orders_of(draw, 24), orders_of(draw, 2), orders_of(draw, 2, 2)
    heads = (2 * np.arange(2)[:, None] + inside).reshape(6, 4)
    heads = np.take_along_axis(heads.reshape(6, 2, 2), groups[..., None], 1).reshape(6, 4)
    values = orders_of(draw, 2, 4)
    return {
        "mlp.gate_proj.weight": [(2, units[:, None])],
        "mlp.up_proj.weight": [(2, units[:, None])],
        "mlp.down_proj.weight": [(1, units[..., None])],
        "self_attn.q_proj.weight": [(2, heads[:, None, :, None])],
        "self_attn.k_proj.weight": [(2, groups[:, None, :, None])],
        "self_attn.v_proj.weight": [(3, values[:, None]), (2, groups[:, None, :, None])],
        "self_attn.o_proj.weight": [(2, values.repeat(2, 1)[..., None]), (1, heads[..., None, None])],
    }


@pytest.mark.parametrize(("block", "orders"), [(None, shuffled_gpt2), (GROUPED, shuffled_llama)], ids=["gpt2", "llama"])
def test_a_smooth_path_is_found_again(block, orders):
    """A flow as layers, each then brought out of order at random: aligned, it is what it was, bit for bit."""
    config = dataclasses.replace(layered(block), weights=BasisConfig("chebyshev", 2))
    smooth = config.build(VOCAB, key=jax.random.PRNGKey(3)).discretise()
    moved = orders(np.random.default_rng(5))

    def reorder(name, array):
        moving = np.asarray(array.array)
        for axis, order in moved.get(name, ()):
            moving = np.take_along_axis(moving, order, axis)
        return hax.named(jnp.asarray(moving), array.axes)

    layers = stack_of(smooth)
    names = iter(arrays(layers.blocks.stacked))
    stacked = map_named(lambda a: reorder(next(names), a), layers.blocks.stacked)
    shuffled = dataclasses.replace(layers, blocks=dataclasses.replace(layers.blocks, stacked=stacked))
    before, after = layer_roughness(shuffled), layer_roughness(align(shuffled))
    assert after == layer_roughness(layers)
    assert before.all > 2 * after.all
    found, expected = arrays(align(shuffled).blocks.stacked), arrays(layers.blocks.stacked)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    logits = eqx.filter_jit(lambda m: m(random_tokens()).array)
    put = lambda w: eqx.tree_at(lambda m: m.transformer.flow.weights, smooth, w)  # noqa: E731
    np.testing.assert_allclose(logits(put(shuffled)), logits(smooth), atol=2e-5)


def test_a_llama_of_levanters():
    """Whose query heads stand in groups: aligned, and read as a flow, it says what it said."""
    config = LlamaConfig(max_seq_len=12, hidden_dim=32, intermediate_dim=24, num_layers=3, num_heads=4, num_kv_heads=2)
    model = jax.tree.map(lambda x: x + 0.05 if is_float(x) else x, config.build(VOCAB, key=jax.random.PRNGKey(0)))
    flow, _ = lift(aligned(enter(model)), BasisConfig("cosine", 3))
    given, found = (
        eqx.filter_jit(lambda m: m(random_tokens(), attn_mask=AttentionMask.causal()).array)(m) for m in (model, flow)
    )
    np.testing.assert_allclose(found, given, atol=1e-4)


def test_roughness_by_hand():
    layers = stack_of(build(layered()))
    given, found = arrays(layers.blocks.stacked), layer_roughness(layers)
    moved = {name: sum(np.sum((a[k + 1] - a[k]) ** 2) for k in range(5)) for name, a in given.items()}
    size = {name: sum(np.sum(a[k + 1] ** 2 + a[k] ** 2) / 2 for k in range(5)) for name, a in given.items()}
    for name in given:
        assert found.by_array[name] == pytest.approx(moved[name] / size[name], rel=1e-4)
    assert found.all == pytest.approx(sum(moved.values()) / sum(size.values()), rel=1e-4)
    assert layer_roughness(stack_of(build(layered(depth=DepthConfig(steps=1))))).all == 0


REFUSALS = {
    "more functions than layers": (layered(), BasisConfig("cosine", 7), "from 6 layers"),
    "pieces without a layer": (
        layered(depth=DepthConfig(solver="tsit5", steps=6)),
        BasisConfig("piecewise", 14),
        r"14 functions of time \(basis: piecewise\) cannot be determined from 31 layers",
    ),
    "as many as fp64 can tell apart": (
        layered(depth=DepthConfig(steps=48)),
        BasisConfig("chebyshev", 48),
        r"singular in fp64",
    ),
    "weights of another kind": (layered(), GeneratedConfig(), "type generated cannot be fitted"),
    "a flow": (small_config("generated"), BasisConfig("cosine", 3), "already a flow"),
    "control": (layered(control=ControlConfig()), BasisConfig("cosine", 3), "control"),
    "layers without an order": (
        small_config("per_layer", block=SsmBlockConfig(num_heads=2, state_size=4)),
        BasisConfig("cosine", 3),
        "--align false",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_lifted(case):
    config, weights, message = REFUSALS[case]
    with pytest.raises(UserError, match=message):
        check_liftable(config, weights, align=True)


def test_state_space_layers_are_fitted_as_they_are():
    config = small_config("per_layer", block=SsmBlockConfig(num_heads=2, state_size=4))
    assert check_liftable(config, BasisConfig("cosine", 3), align=False)
    _, found = lift(build(config), BasisConfig("cosine", 3))
    assert found.error < 1e-5
