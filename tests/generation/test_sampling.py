"""Tokens are drawn from the distribution that temperature, top-k and top-p define."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from qkvflow.errors import UserError
from qkvflow.generation import sampling
from qkvflow.generation.sampling import Sampling, SamplingOptions

choose, log_probabilities = eqx.filter_jit(sampling.choose), eqx.filter_jit(sampling.log_probabilities)


def reference(logits, temperature=1.0, top_k=None, top_p=None):
    """The distribution by the definition, in float64: one token after another, the likeliest first."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept = order[: top_k or len(order)]
    if top_p is not None:
        mass, within = p[kept].sum(), 0.0
        for count, token in enumerate(kept, start=1):
            within += p[token] / mass
            if within >= top_p:
                kept = kept[:count]
                break
    result = np.zeros_like(p)
    result[kept] = p[kept]
    return result / result.sum()


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distribution(options):
    logits = np.random.default_rng(0).normal(0.0, 3.0, (4, 40)).astype(np.float32)
    given = {"temperature": 1.0} | options
    found = jax.nn.softmax(log_probabilities(jnp.asarray(logits), Sampling.of([SamplingOptions(**given)] * 4)))
    expected = np.stack([reference(row.astype(np.float64), **given) for row in logits])
    np.testing.assert_array_equal(np.asarray(found) > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_each_sequence_has_its_own_options():
    logits = jnp.asarray(np.random.default_rng(1).normal(0.0, 3.0, (len(OPTIONS), 40)), jnp.float32)
    options = [SamplingOptions(**{"temperature": 1.0} | o) for o in OPTIONS]
    together = log_probabilities(logits, Sampling.of(options))
    for i, o in enumerate(options):
        np.testing.assert_array_equal(log_probabilities(logits[i : i + 1], Sampling.of([o]))[0], together[i])


@pytest.mark.parametrize("top_p", [1e-6, 1e-37, 1e-45, 1e-50])
def test_the_likeliest_token_stays_however_small_top_p_is(top_p):
    options = Sampling.of([SamplingOptions(1.0, top_p=top_p)])
    kept = jnp.isfinite(log_probabilities(jnp.asarray([[0.0, 1.0, 9.0, 2.0]]), options))
    assert np.flatnonzero(kept[0]).tolist() == [2]


def test_equal_logits_keep_exactly_k():
    kept = jnp.isfinite(log_probabilities(jnp.zeros((1, 10)), Sampling.of([SamplingOptions(1.0, top_k=3)])))
    assert np.flatnonzero(kept[0]).tolist() == [0, 1, 2]


def test_temperature_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(5, 40)), jnp.float32)
    greedy = jnp.argmax(logits, axis=-1)
    position = jnp.arange(5)
    np.testing.assert_array_equal(choose(logits, Sampling.of([SamplingOptions(top_p=0.9)] * 5), position), greedy)
    mixed = Sampling.of([SamplingOptions(float(i == 2), seed=i) for i in range(5)])
    chosen = choose(logits, mixed, position)
    np.testing.assert_array_equal(np.delete(chosen, 2), np.delete(greedy, 2))


def test_small_temperatures_tend_to_greedy():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(5, 40)), jnp.float32)
    chosen = choose(logits, Sampling.of([SamplingOptions(1e-30)] * 5), jnp.arange(5))
    np.testing.assert_array_equal(chosen, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.95}], ids=str)
def test_chi_squared(options):
    """20000 draws at as many positions: the statistic of a correct sampler exceeds its 0.999 quantile once in 1000
    seeds; a distribution that is wrong by 2 % in one likely token exceeds it."""
    draws = 20_000
    logits = np.random.default_rng(4).normal(0.0, 1.0, 12).astype(np.float32)
    given = {"temperature": 1.0} | options
    options = jax.tree.map(lambda a: jnp.repeat(a, draws), Sampling.of([SamplingOptions(**given, seed=11)]))
    tokens = choose(jnp.tile(jnp.asarray(logits), (draws, 1)), options, jnp.arange(draws))
    expected = reference(logits.astype(np.float64), **given)
    counts, kept = np.bincount(tokens, minlength=12), expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert statistic < stats.chi2.ppf(0.999, kept.sum() - 1)


def test_seed_and_position_fix_the_draw():
    logits = jnp.zeros((1, 1000))

    def draw(seed, position):
        return int(choose(logits, Sampling.of([SamplingOptions(1.0, seed=seed)]), jnp.asarray([position]))[0])

    assert draw(3, 8) == draw(3, 8)
    assert len({draw(3, position) for position in range(10)}) > 5
    assert len({draw(seed, 8) for seed in range(10)}) > 5


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"temperature": True}, {"top_k": 2.0}, {"top_p": -1}])
def test_bad_options(bad):
    with pytest.raises(UserError):
        SamplingOptions(**bad)


def test_options_may_be_numpys():
    given = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "seed": 3}
    numpys = {"temperature": np.float32(0.7), "top_k": np.int64(5), "top_p": np.float32(0.5), "seed": np.int64(3)}
    one, other = (jax.tree.leaves(Sampling.of([SamplingOptions(**options)])) for options in (given, numpys))
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for kind in (np.int32, np.uint32):  # 2**32 is none of theirs
        assert Sampling.of([SamplingOptions(seed=kind(3))]).seed.tolist() == [3]
    with pytest.raises(UserError, match="seed"):
        SamplingOptions(seed=np.float32(1))
