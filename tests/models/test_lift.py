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


def shuffled_gpt2(block, draw):
    """Each array in the order of its layer, told by its place: the first layer stays."""
    units, heads = (np.stack([np.arange(n), *(draw.permutation(n) for _ in range(5))]) for n in (32, 2))
    return {
        "mlp.c_fc.weight": (units, 2),  # layers, embed, mlp
        "mlp.c_fc.bias": (units, 1),
        "mlp.c_proj.weight": (units, 1),
        "attn.c_attn.weight": (heads, 3),  # layers, embed, qkv, heads, head_size
        "attn.c_attn.bias": (heads, 2),
        "attn.c_proj.weight": (heads, 1),
    }


def shuffled_llama(block, draw):
    """Heads of keys and values with their queries, and queries within their group."""
    units, groups = (np.stack([np.arange(n), *(draw.permutation(n) for _ in range(5))]) for n in (24, 2))
    inside = [[draw.permutation(2) for _ in range(2)] for _ in range(5)]
    heads = np.stack([np.arange(4), *(np.concatenate([2 * g + p for g, p in zip(gs, ps, strict=True)])
                                      for gs, ps in zip(groups[1:], inside, strict=True))])  # fmt: skip
    return {
        "mlp.gate_proj.weight": (units, 2),
        "mlp.up_proj.weight": (units, 2),
        "mlp.down_proj.weight": (units, 1),
        "self_attn.q_proj.weight": (heads, 2),
        "self_attn.k_proj.weight": (groups, 2),
        "self_attn.v_proj.weight": (groups, 2),
        "self_attn.o_proj.weight": (heads, 1),
    }


@pytest.mark.parametrize(("block", "orders"), [(None, shuffled_gpt2), (GROUPED, shuffled_llama)], ids=["gpt2", "llama"])
def test_a_smooth_path_is_found_again(block, orders):
    """A flow as layers, each then brought out of order at random: aligned, it is what it was, bit for bit."""
    config = dataclasses.replace(layered(block), weights=BasisConfig("chebyshev", 2))
    smooth = config.build(VOCAB, key=jax.random.PRNGKey(3)).discretise()
    draw = np.random.default_rng(5)
    moved = orders(config.block, draw)

    def reorder(name, array):
        order, axis = moved.get(name, (None, 0))
        if order is None:
            return array
        rows = [jnp.take(row, order[k], axis=axis - 1) for k, row in enumerate(array.array)]
        return hax.named(jnp.stack(rows), array.axes)

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
