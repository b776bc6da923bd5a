"""Exits per token: the full model at threshold 0, decided by a token's own prefix, with the caches of generation."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, build, is_float, random_tokens, small_config

import qkvflow
from qkvflow.axes import BATCH, POSITION
from qkvflow.blocks import Inputs, SsmBlockConfig, Window
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.generation.forced import ForcedReader
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models.cached import CachedModel
from qkvflow.models.exits import ExitConfig, ExitMemory

SSM = SsmBlockConfig(num_heads=2, state_size=16)
# Widths are multiples of 64, or kernels of few rows may differ in their last bits (`qkvflow.generation.rows`).
CASES = {
    "velocity": ({}, ExitConfig("velocity", 0.5)),
    "kl": ({"prelude_layers": 1}, ExitConfig("kl", 0.02)),
    "margin": ({"form": "sequential", "depth": DepthConfig(solver="heun", steps=4)}, ExitConfig("margin", 0.95)),
    "split": ({"form": "split"}, ExitConfig("velocity", 0.5)),
    "recurrence": ({"block": SSM, "coda_layers": 1}, ExitConfig("velocity", 0.5, min_steps=2)),
    "reversible": ({"depth": DepthConfig(steps=4, adjoint="reversible")}, ExitConfig("velocity", 0.6)),
}
LENGTH = 16


@functools.cache
def model_of(name):
    changes, _ = CASES[name]
    config = small_config(**{"depth": DepthConfig(steps=4), **changes})
    config = dataclasses.replace(config, max_seq_len=LENGTH, hidden_dim=64)
    model = config.build(VOCAB, key=jax.random.PRNGKey(0))
    return inference_mode(jax.tree.map(lambda a: 2 * a if is_float(a) else a, model), True)


@functools.cache
def cached(name, exits=True):
    return CachedModel.of(model_of(name), CASES[name][1] if exits else None)


def read(name, tokens, threshold):
    """Token by token, as generation does: logits [batch, position, vocab], and the steps of each [batch, position]."""
    model = cached(name)
    assert model.exit is not None
    exits = dataclasses.replace(model.exit, threshold=jnp.float32(threshold))
    return map(np.asarray, _read(dataclasses.replace(model, exit=exits), tokens))


@eqx.filter_jit
def _read(model, tokens):
    Batch = hax.Axis(BATCH, tokens.shape[0])

    def token(carry, now):
        at, memory = carry
        window = Window(hax.full(Batch, 0, dtype=jnp.int32) + at, hax.ones(Batch, dtype=jnp.int32))
        x, after = model.extend(hax.named(now[:, None], (Batch, hax.Axis(POSITION, 1))), Inputs(window=window), memory)
        spent = after[1].spent[:, 0] - memory[1].spent[:, 0]
        return (at + 1, after), (model.logits(x).array[:, 0], spent)

    _, (logits, steps) = jax.lax.scan(token, (jnp.int32(0), model.memory(Batch, LENGTH)), tokens.T)
    return jnp.moveaxis(logits, 0, 1), steps.T


def some_leave(name, tokens):
    """A threshold at which tokens leave at different steps."""
    for threshold in (*np.geomspace(4, 1.01, 8), *np.linspace(1, 0.5, 60), *np.geomspace(0.5, 1e-4, 16)):
        steps = list(read(name, tokens, threshold))[1]
        if np.mean(steps != np.median(steps)) > 0.1:
            break
    assert len(np.unique(steps)) > 1
    return float(threshold)


@pytest.mark.parametrize("name", list(CASES))
def test_a_token_depends_on_its_own_prefix_alone(name):
    """Later tokens and other sequences change, and with them who still goes on beside it: not a bit changes."""
    tokens = random_tokens(batch=4, length=LENGTH).array
    threshold = some_leave(name, tokens)
    logits, steps = read(name, tokens, threshold)
    assert CASES[name][1].min_steps <= steps.min() < steps.max() <= model_of(name).config.depth.steps
    others = (tokens + 1 + jnp.arange(4)[:, None]) % VOCAB.size
    for changed in (
        others.at[1].set(tokens[1]),
        tokens.at[:, 9:].set(others[:, 9:]),
        others.at[1, :9].set(tokens[1, :9]),
    ):
        theirs, taken = read(name, changed, threshold)
        same = np.cumprod(np.asarray(changed == tokens), axis=1).astype(bool)
        assert same[1, :9].all()
        np.testing.assert_array_equal(theirs[same], logits[same])
        np.testing.assert_array_equal(taken[same], steps[same])
        assert (taken != steps).any(), "what changes must change decisions"


@pytest.mark.parametrize("name", list(CASES))
def test_a_tiny_threshold_is_the_full_model(name):
    """Nobody leaves: the logits of the model without exits, to rounding; at 0, the same program."""
    tokens = random_tokens(batch=2, length=LENGTH)
    logits, steps = read(name, tokens.array, 0.0)
    assert (steps == model_of(name).config.depth.steps).all()
    expected = model_of(name)(tokens).rearrange((BATCH, POSITION, "vocab")).array
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
    zero = CachedModel.of(model_of(name), dataclasses.replace(CASES[name][1], threshold=0.0))
    assert jax.tree.structure(zero) == jax.tree.structure(cached(name, exits=False))


def test_a_token_that_stops_keeps_its_state():
    """With a threshold that all pass, everything after min_steps is a flow of that many of the steps."""
    name = "velocity"
    model, tokens = model_of(name), random_tokens(batch=2, length=LENGTH)
    logits, steps = read(name, tokens.array, 1e9)
    assert (steps == 1).all()
    # One token has no earlier ones to look at, so nothing but its own first step matters.
    flow, x = model.transformer.flow, model.embeddings(tokens[POSITION, :1])
    x = x + flow.increment(0, x, Inputs.of())
    expected = hax.dot(model.transformer.norm(x), model.get_lm_head(), axis="embed").rearrange(
        (BATCH, POSITION, "vocab")
    )
    np.testing.assert_allclose(logits[:, 0], expected.array[:, 0], rtol=2e-5, atol=2e-5)


def test_a_prompt_in_one_piece_is_read_as_token_by_token():
    """Teacher forcing reads many positions at once: the same decisions and logits, to rounding."""
    name, tokens = "velocity", random_tokens(batch=3, length=LENGTH)
    threshold = some_leave(name, tokens.array)
    logits, steps = read(name, tokens.array, threshold)
    model, Batch = CachedModel.of(model_of(name), ExitConfig("velocity", threshold)), tokens.resolve_axis(BATCH)
    window = Window(hax.zeros(Batch, dtype=jnp.int32), hax.full(Batch, LENGTH, dtype=jnp.int32))
    x, memory = eqx.filter_jit(CachedModel.extend)(model, tokens, Inputs(window=window), model.memory(Batch, LENGTH))
    found = model.logits(x).rearrange((BATCH, POSITION, "vocab")).array
    np.testing.assert_allclose(found, logits, rtol=2e-5, atol=2e-5)
    assert isinstance(memory[1], ExitMemory)
    np.testing.assert_array_equal(memory[1].spent[:, 0], steps.sum(axis=1))


def test_refusals():
    flow = small_config(depth=DepthConfig(steps=3))
    for wrong, words in (
        ({"rule": "velocity", "threshold": -0.1}, "threshold"),
        ({"rule": "entropy", "threshold": 0.1}, "not known. Choices: kl, velocity, margin"),
        ({"rule": "kl", "threshold": 0.1, "min_steps": 0}, "min_steps"),
        ({"rule": "kl", "threshold": float("nan")}, "threshold"),
        ({"rule": "kl", "threshold": np.float32(-0.1)}, "threshold"),
        ({"rule": "kl", "threshold": np.float32("nan")}, "threshold"),
        ({"rule": "kl", "threshold": 0.1, "min_steps": np.int64(-5)}, "min_steps"),
        ({"rule": "kl", "threshold": "0.1"}, "threshold must be a number of at least 0, got '0.1'"),
        ({"rule": "kl", "threshold": None}, "threshold must be a number"),
    ):
        with pytest.raises(UserError, match=words):
            ExitConfig(**wrong)
    model = flow.build(VOCAB, key=jax.random.PRNGKey(0))
    for wrong in ("kl", True, ["kl", 0.1]):
        with pytest.raises(UserError, match="exit must be a mapping such as"):
            qkvflow.generate(model, random_tokens(length=4), 4, exit=wrong)
    good = ExitConfig("kl", 0.1)
    adaptive = dataclasses.replace(flow, depth=DepthConfig(solver="heun", rtol=1e-3))
    for config, exits, cache, words in (
        (flow, dataclasses.replace(good, min_steps=3), True, "min_steps must be below the 3 steps"),
        (dataclasses.replace(flow, coda_layers=1), good, True, "Use rule: velocity"),
        (adaptive, good, True, "adaptive steps"),
        (flow, good, False, "use_cache"),
    ):
        with pytest.raises(UserError, match=words):
            PreparedModel(build(config), cache, exits=exits)


def examples(model, batches=2, batch=3, length=100):
    for seed in range(batches):
        tokens = random_tokens(seed=seed, batch=batch, length=length)
        weight = hax.ones(tokens.axes).at[POSITION, -1].set(0.0)
        yield LmExample(tokens, weight, AttentionMask.causal())


def test_teacher_forcing_has_the_loss_of_the_model_and_of_its_exits():
    """In chunks, from caches: the full model's loss; and at the calibrated threshold no more than was allowed."""
    config = dataclasses.replace(small_config(depth=DepthConfig(steps=4)), max_seq_len=128)
    model = inference_mode(build(config), True)
    given = list(examples(model))
    reader = ForcedReader(model, ExitConfig("velocity", 0.0))
    full = reader.read(given, 0.0)
    losses = [model.compute_next_token_loss(e).item() for e in given]
    assert full.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert full.evaluations == full.of == 4
    one = reader.read(given, 1e9)
    assert one.evaluations == 1
    cost = abs(one.loss - full.loss) / 3
    found = reader.calibrate(given, cost, full.loss)
    assert found.loss <= full.loss + cost
    assert found == reader.read(given, found.threshold)


def test_generation_with_exits():
    """Greedy texts with exits: the same with drafts, with the steps that were spent, and the full model's at 0."""
    config = dataclasses.replace(small_config(depth=DepthConfig(steps=4)), max_seq_len=64, hidden_dim=64)
    model = config.build(VOCAB, key=jax.random.PRNGKey(0))
    model = jax.tree.map(lambda a: 3 * a if is_float(a) else a, model)
    tokens, told = random_tokens(batch=2, length=6), []
    plain = np.asarray(qkvflow.generate(model, tokens, 40).array)
    zero = qkvflow.generate(model, tokens, 40, exit={"rule": "velocity", "threshold": 0}, report=told.append)
    np.testing.assert_array_equal(zero.array, plain)
    every = told.pop()
    assert (every.mean, every.of, every.tokens) == (4, 4, 2 * (6 + 40 - 1))
    exits = {"rule": "velocity", "threshold": 0.6}
    left = np.asarray(qkvflow.generate(model, tokens, 40, exit=exits, report=told.append).array)
    assert 1 <= told[0].mean < told[0].of == 4
    assert told[0].tokens == 2 * (6 + 40 - 1)
    drafted = qkvflow.generate(model, tokens, 40, exit=exits, draft_steps=2, draft_tokens=3)
    np.testing.assert_array_equal(drafted.array, left)
    with pytest.raises(UserError, match="threshold"):
        qkvflow.generate(model, tokens, 4, exit={"rule": "kl", "threshold": -1.0})
    with pytest.raises(UserError, match="keys such as"):
        qkvflow.generate(model, tokens, 4, exit={"rule": "kl", "limit": 1.0})
