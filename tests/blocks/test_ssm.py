"""Laws of the state-space block: parallel equals sequential, gradients too; causal, segmented, stable, decodable."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask
from support.models import VOCAB, build, heavy, random_tokens, small_config

from qkvflow.blocks import Inputs, SsmBlockConfig, SsmMixer, Window, state_space
from qkvflow.blocks.chunked import CHUNK, chunked
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError

Embed, State = Axis("embed", 8), Axis("state", 4)


def mixer(selective, seed=0):
    return SsmMixer.init(Embed, State, selective=selective, key=jax.random.PRNGKey(seed))


def signal(length, batch=2, seed=1):
    return hax.random.normal(jax.random.PRNGKey(seed), (Axis("batch", batch), Axis("position", length), Embed))


def segments(length):
    ids = hax.named(jnp.asarray(np.repeat(np.arange(5), -(-length // 5))[:length]), "position")
    return AttentionMask.causal().with_segment_ids(ids)


@pytest.mark.parametrize("method", list(CHUNK))
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    ("length", "mask"),
    [(1, None), (37, "segments"), *(pytest.param(n, None, marks=pytest.mark.slow) for n in (7, 16, 37))],
)
def test_chunked_is_sequential(method, selective, length, mask, monkeypatch):
    """Values and every gradient, by both ways of doing a chunk; `associative` is what GPUs and TPUs run."""
    monkeypatch.setitem(CHUNK, "associative", 8)
    monkeypatch.setattr(state_space, "chunked", functools.partial(chunked, method=method))
    m, x = mixer(selective), signal(length)
    mask = segments(length) if mask else None

    def loss(m, x, run):
        y = run(m, x, mask)
        return hax.sum(hax.sin(y)).array, y

    def both(run):
        params, static = eqx.partition(m, eqx.is_inexact_array)
        fn = lambda p, x: loss(eqx.combine(p, static), x, run)  # noqa: E731
        (_, y), grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(params, x)
        return y.array, jax.tree.leaves(grads)

    y, grads = both(lambda m, x, mask: m(x, mask))
    reference, expected = both(lambda m, x, mask: m.sequential(x, mask))
    np.testing.assert_allclose(y, reference, atol=1e-5, rtol=1e-5)
    for a, b in zip(grads, expected, strict=True):
        assert float(jnp.abs(a - b).max()) <= 1e-4 * max(1.0, float(jnp.abs(b).max()))


@pytest.mark.parametrize("selective", [False, True])
def test_one_step_after_another_is_the_whole(selective):
    m, x = mixer(selective), signal(9)
    Batch = x.resolve_axis("batch")
    state = m.initial_state(Batch)
    whole = m(x, None)
    for k in range(9):
        window = Window(hax.full(Batch, k, jnp.int32), hax.ones(Batch, jnp.int32))
        y, state = m.extend(x["position", k : k + 1], Inputs(window=window), state)
        np.testing.assert_allclose(y.array, whole["position", k : k + 1].rearrange(y.axes).array, atol=1e-5)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("rate", [1e-6, 1.0, 50.0])
def test_stable_at_the_ends_of_its_range(selective, rate):
    """Slow and fast systems: finite over 4096 positions, with finite gradients."""
    m, x = mixer(selective), signal(4096, batch=1)
    raw = np.log(np.expm1(rate)) if rate < 20 else rate
    m = eqx.tree_at(lambda m: m.space.A_raw, m, hax.full_like(m.space.A_raw, raw))
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: hax.mean(hax.square(m(x, None))).array))(m)
    assert bool(jnp.isfinite(value))
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("selective", [False, True])
def test_bf16_input(selective):
    """The recurrence is fp32; what is left is the rounding of input, projections and output to 8 bits."""
    m, x = mixer(selective), signal(64)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, m)
    y, reference = low(x.astype(jnp.bfloat16), None), m(x, None).array
    assert y.dtype == jnp.bfloat16
    assert float(jnp.abs(y.array - reference).max() / jnp.abs(reference).max()) < 0.05


@pytest.mark.parametrize("selective", [True, heavy(False)])
@pytest.mark.parametrize("weights", ["constant", *map(heavy, ("generated", "modulated", "per_layer"))])
def test_causal_and_discretised(selective, weights):
    block = SsmBlockConfig(num_heads=2, state_size=4, selective=selective)
    model = build(small_config(weights, block=block, depth=DepthConfig(steps=2)))
    run = eqx.filter_jit(lambda m, tokens: m(tokens).array)
    tokens = random_tokens()
    other = hax.named(tokens.array.at[:, 6].set((tokens.array[:, 6] + 1) % VOCAB.size), tokens.axes)
    a, b = run(model, tokens), run(model, other)
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    assert not np.array_equal(a[:, 6:], b[:, 6:])
    np.testing.assert_allclose(run(model.discretise(), tokens), a, atol=1e-5)


@pytest.mark.parametrize("selective", [False, True])
def test_packed_documents_do_not_see_each_other(selective):
    model = build(small_config(block=SsmBlockConfig(num_heads=2, state_size=4, selective=selective)))
    ids = hax.named(jnp.asarray([0] * 6 + [1] * 6), "position")
    mask = AttentionMask.causal().with_segment_ids(ids)
    run = eqx.filter_jit(lambda tokens: model(tokens, mask).array)
    tokens = random_tokens()
    other = hax.named(tokens.array.at[:, 2].set((tokens.array[:, 2] + 1) % VOCAB.size), tokens.axes)
    a, b = run(tokens), run(other)
    np.testing.assert_array_equal(a[:, 6:], b[:, 6:])
    assert not np.array_equal(a[:, 2:6], b[:, 2:6])


def test_state_size_must_be_positive():
    with pytest.raises(UserError, match="state_size"):
        SsmBlockConfig(num_heads=2, state_size=0)
