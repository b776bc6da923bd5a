"""Laws of the convolution before the attention: its formula, causal, segmented, nothing at first, in no export."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask
from support.models import VOCAB, WEIGHTS, build, change, heavy, random_tokens, small_config

from qkvflow import official
from qkvflow.blocks import Gpt2BlockConfig, Inputs, Window
from qkvflow.blocks.convolution import Convolution
from qkvflow.errors import UserError
from qkvflow.hub.custom import custom

Batch, Pos, Embed = Axis("batch", 2), Axis("position", 9), Axis("embed", 3)
PLAIN = Gpt2BlockConfig(num_heads=2, mlp_scale=2)
BLOCK = dataclasses.replace(PLAIN, convolution=4)
logits = eqx.filter_jit(lambda model, tokens, mask=None: model(tokens, mask).array)


def layer() -> Convolution:
    return Convolution(hax.random.normal(jax.random.PRNGKey(0), (Axis("taps", 4), Embed)))


def signal(seed=1):
    return hax.random.normal(jax.random.PRNGKey(seed), (Batch, Pos, Embed))


@pytest.mark.parametrize("mask", [None, "documents"])
def test_it_is_its_formula(mask):
    """Position by position, in NumPy; a document hears nothing of the one before it."""
    ids = np.asarray([0] * 4 + [1] * 2 + [2] * 3)
    given = AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray(ids), "position")) if mask else None
    own, x = layer(), signal()
    w, values = np.asarray(own.weight.array), np.asarray(x.array)
    expected = values.copy()
    for k in range(9):
        for j in range(min(4, k + 1)):
            if not mask or ids[k - j] == ids[k]:
                expected[:, k] += w[j] * values[:, k - j]
    np.testing.assert_allclose(own(x, given).array, expected, atol=1e-5)


@pytest.mark.parametrize("pieces", [(1,) * 9, (2, 4, 3), (9,)])
def test_one_piece_after_another_is_the_whole(pieces):
    """Also where pieces are longer than what is real in them, and that differs between sequences."""
    own, x = layer(), signal()
    whole, before, start = own(x, None), own.nothing_before(Batch, jnp.float32), 0
    for size in pieces:
        padded = hax.concatenate("position", [x["position", start : start + size], 9 * signal(5)["position", 0:2]])
        window = Window(hax.full(Batch, start, jnp.int32), hax.full(Batch, size, jnp.int32))
        y, before = own.extend(padded, Inputs(window=window), before)
        np.testing.assert_allclose(
            y["position", 0:size].array, whole["position", start : start + size].array, atol=1e-5
        )
        start += size


def test_what_is_kept_after_each_position_of_a_trial():
    own, x = layer(), signal()
    before = hax.random.normal(jax.random.PRNGKey(3), own.nothing_before(Batch, jnp.float32).axes)
    count = hax.named(jnp.asarray([2, 5]), Batch)
    window = Window(hax.full(Batch, 0, jnp.int32), count)
    _, every = own.extend(x, Inputs(window=dataclasses.replace(window, trial=True)), before)
    _, last = own.extend(x, Inputs(window=window), before)
    assert {a.name for a in every.axes} == {"batch", "position", "taps", "embed"}
    for row, n in enumerate((2, 5)):
        np.testing.assert_array_equal(every.array[row, n - 1], last.array[row])
        one = Window(hax.full(Batch, 0, jnp.int32), hax.full(Batch, n, jnp.int32))
        _, alone = own.extend(x["position", 0:n], Inputs(window=one), before)
        np.testing.assert_array_equal(last.array[row], alone.array[row])


@pytest.mark.parametrize("weights", ["basis", *map(heavy, (name for name in WEIGHTS if name != "basis"))])
def test_causal_and_discretised(weights):
    model, tokens = build(small_config(weights, block=BLOCK)), random_tokens()
    a, b = logits(model, tokens), logits(model, change(tokens, 6))
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    assert not np.array_equal(a[:, 6:], b[:, 6:])
    np.testing.assert_allclose(logits(model.discretise(), tokens), a, atol=1e-5)


def test_it_starts_as_the_block_without_it_and_learns():
    tokens, key = random_tokens(), jax.random.PRNGKey(0)
    models = [small_config("constant", block=block).build(VOCAB, key=key) for block in (BLOCK, PLAIN)]
    np.testing.assert_array_equal(*(logits(model, tokens) for model in models))
    slope = eqx.filter_grad(lambda model: hax.sum(hax.sin(model(tokens))).array)(models[0])
    assert np.abs(np.asarray(slope.transformer.flow.weights.convolution.weight.array)).min() > 0
    assert BLOCK.flops_per_token(16, 12) - PLAIN.flops_per_token(16, 12) == 2 * 4 * 16


def test_it_is_refused_where_it_would_be_lost():
    model = build(small_config("generated", block=BLOCK))
    with pytest.raises(UserError, match=r"has no `block\.convolution: 4`"):
        official.to_arrays(model)
    with pytest.raises(UserError, match=r"a convolution.* cannot be exported"):
        custom(model.config, {}, 64)
    with pytest.raises(UserError, match="convolution"):
        Gpt2BlockConfig(convolution=1)
