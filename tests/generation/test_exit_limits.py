"""Limits of exits per text: one program, in which each text exits as it does alone, and as its own limits say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, is_float, small_config

from qkvflow.blocks import SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.generation import Drafting, SamplingOptions
from qkvflow.generation.drafting import DraftMemory
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models.exits import OWN, Exit, ExitConfig

STEPS, LENGTH, NEW = 4, 64, 12
SSM = {"block": SsmBlockConfig(num_heads=2, state_size=16), "coda_layers": 1}
# (changes of the model, rule, a threshold at which tokens exit at different steps)
CASES = {
    "velocity": ({}, "velocity", 0.5),
    "kl": ({"prelude_layers": 1}, "kl", 0.02),
    "margin": ({"form": "sequential", "depth": DepthConfig(solver="heun", steps=STEPS)}, "margin", 0.9),
    "recurrence": (SSM, "velocity", 0.5),
    "reversible": ({"depth": DepthConfig(steps=STEPS, adjoint="reversible")}, "velocity", 0.6),
    "drafted": ({}, "velocity", 0.5),
}
FAST = ("velocity", "kl")
ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]


@functools.cache
def model_of(name):
    changes, _, _ = CASES[name]
    config = small_config(**{"depth": DepthConfig(steps=STEPS), **changes})
    config = dataclasses.replace(config, max_seq_len=LENGTH, hidden_dim=64)
    model = config.build(VOCAB, key=jax.random.PRNGKey(0))
    return inference_mode(jax.tree.map(lambda a: 2 * a if is_float(a) else a, model), True)


@functools.cache
def engine_of(name, threshold=None, vary=True):
    """threshold: the default of the engine; None for the case's own, -1 for an engine without exits."""
    _, rule, own = CASES[name]
    exits = None if threshold == -1 else ExitConfig(rule, own if threshold is None else threshold)
    drafting = Drafting(2, 2) if name == "drafted" else None
    prepared = PreparedModel(model_of(name), drafting=drafting, exits=exits, exits_vary=vary and exits is not None)
    return prepared.engine(4, LENGTH, elastic=True)


def limits(name, i):
    """The engine's own, none, a high threshold, and a high one with more steps."""
    _, rule, own = CASES[name]
    return (None, ExitConfig(rule, 0.0), ExitConfig(rule, 3 * own), ExitConfig(rule, 1e9, min_steps=3))[i]


def insert(engine, slot, i, exits, temperature=None):
    options = SamplingOptions(0.8 * (i % 2) if temperature is None else temperature, seed=i, logprobs=True, exits=exits)
    text = engine.begin((np.arange(5 + i) * 7 % 64).tolist(), NEW, options)
    while text.unread:
        engine.prefill(text)
    engine.insert(slot, text, logprobs=True)


def told(step, slot):
    return [(t, float(step.logprobs.token[at]), step.logprobs.top[at].tolist()) for t, _, at in step.added(slot)]


def spent(engine, slot):
    """Steps and tokens of the text in a slot."""
    memory = engine._kind.join(engine._state).memory
    memory = memory.full if isinstance(memory, DraftMemory) else memory
    return np.asarray(memory[1].spent[engine._rows.row(slot)]).tolist()


def alone(engine, i, exits, temperature=None):
    """(tokens with their log-probabilities, steps and tokens) of a text by itself, in two rows."""
    for slot in range(4):
        engine.cancel(slot)
    while engine.rows > 2:
        engine.decode(1)
    insert(engine, 0, i, exits, temperature)
    found = []
    while len(found) < NEW:
        found += told(engine.decode(1), 0)
    return found, None if engine.exited() is None else spent(engine, 0)


@pytest.mark.parametrize("name", ALL)
def test_a_text_exits_as_it_does_alone(name):
    """Beside texts with other limits, which come later: not a bit of its log-probabilities, not one step differs."""
    engine = engine_of(name)
    expected = [alone(engine, i, limits(name, i)) for i in range(4)]
    means = [steps / tokens for _, (steps, tokens) in expected]
    assert means[1::2] == [STEPS, 3], "none, and after 3 steps"
    assert means[2] < min(means[0], STEPS), "limits must matter"
    for slot in range(4):
        engine.cancel(slot)
    found, left = [[] for _ in range(4)], {}
    for moment in range(3 * NEW):
        if moment % 3 == 0 and moment < 12:
            i = moment // 3
            insert(engine, i, i, limits(name, i))
        step = engine.decode(1)
        for i in range(4):
            if len(found[i]) < NEW:
                found[i] += told(step, i)
                left[i] = spent(engine, i)
    assert [(found[i], left[i]) for i in range(4)] == expected


@pytest.mark.parametrize("name", ALL)
def test_a_threshold_of_zero_is_the_full_model(name):
    """Bit for bit that of an engine whose default it is; of one without exits to rounding, with the same text."""
    zero = ExitConfig(CASES[name][1], 0.0)
    found, (steps, tokens) = alone(engine_of(name), 0, zero)
    assert steps == STEPS * tokens
    assert (found, [steps, tokens]) == alone(engine_of(name, 0.0), 0, None)
    plain, nothing = alone(engine_of(name, -1), 0, None)
    assert nothing is None
    assert [t[0] for t in plain] == [t[0] for t in found]
    np.testing.assert_allclose([t[1] for t in plain], [t[1] for t in found], rtol=2e-5, atol=2e-5)
    if name in FAST:  # where products in parts have the bits of the whole ones
        assert plain == found


@pytest.mark.parametrize("name", ALL)
def test_a_text_may_ask_for_what_is_another_engines_default(name):
    rule, threshold = CASES[name][1], 2 * CASES[name][2]
    asked = alone(engine_of(name), 1, ExitConfig(rule, threshold))
    assert asked == alone(engine_of(name, threshold, vary=False), 1, None)
    assert asked == alone(engine_of(name, 0.0), 1, ExitConfig(rule, threshold))


def test_rows_have_their_own_limits_or_the_rules():
    rule = Exit.of(ExitConfig("kl", 0.3, 2), 6, False)
    rows = rule.of_rows(jnp.asarray([OWN, 0.0, 0.1], jnp.float32), jnp.asarray([OWN, 4, OWN], jnp.int32))
    np.testing.assert_array_equal(rows.threshold, np.asarray([0.3, 0.0, 0.1], np.float32))
    np.testing.assert_array_equal(rows.min_steps, [2, 4, 2])


def test_thresholds_are_not_rounded_to_the_precision_of_the_model():
    prepared = PreparedModel(model_of("velocity"), dtype="bf16", exits=ExitConfig("velocity", 0.3))
    assert prepared.model.exit.threshold == np.float32(0.3)
