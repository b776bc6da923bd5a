"""The engine: what a text gets depends on nothing but itself, bit for bit, and is told as it is."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.utils.tree_utils import inference_mode
from support.models import is_float, llama, small_config

from qkvflow.blocks import SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.generation import Drafting, SamplingOptions
from qkvflow.generation.logprobs import MOST
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models import ControlConfig

pytestmark = pytest.mark.slow  # compiles steps of many sizes; tests/serving has the same law for a server
LENGTH = 48
HYBRID = {"block": SsmBlockConfig(num_heads=2, state_size=16), "control": ControlConfig(dim=2)}
# Where columns (here 257) are no multiple of 64, kernels of few rows may differ in last bits: the head is filled up.
MODELS = {
    "byte vocabulary": ({}, 256, 257),
    "llama": ({"block": llama()}, 256, 64),
    "state space and control": (HYBRID, 16, 64),
    "selective": ({"block": SsmBlockConfig(num_heads=2, state_size=16, selective=True)}, 256, 64),
}


def model_of(name="byte vocabulary", scale=4.0):
    changes, width, vocab = MODELS[name]
    config = small_config(depth=DepthConfig(steps=2), **changes)
    config = dataclasses.replace(config, max_seq_len=LENGTH, hidden_dim=width)
    model = config.build(hax.Axis("vocab", vocab), key=jax.random.PRNGKey(0))
    return jax.tree.map(lambda a: scale * a if is_float(a) else a, model)  # texts that vary


@functools.cache
def _engine_of(name):
    return PreparedModel(model_of(name)).engine(8, LENGTH, elastic=True)


def engine_of(name="byte vocabulary"):
    """An engine without texts. One for all tests, since compiling it is what takes time."""
    engine = _engine_of(name)
    for slot in range(8):
        engine.cancel(slot)
    while engine.rows > 2:
        engine.decode(1)
    return engine


def prompt(i, vocab=64):
    return (np.arange(3 + 2 * i) * 7 % vocab).tolist()


def options(i):
    """Greedy and drawn, with limits and without."""
    kinds = ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5})
    return SamplingOptions(**kinds[i % 4], seed=i, logprobs=True, bias={3: -1.0} if i % 3 == 0 else {})


def begun(engine, i, new=20):
    control = np.full(2, i, np.float32) if engine._control_dim else None
    text = engine.begin(prompt(i), new, options(i), control)
    while text.unread:
        engine.prefill(text)
    return text


def told(step, slot):
    lp = step.logprobs
    return int(step.token[slot]), float(lp.token[slot, 0]), lp.top[slot, 0].tolist(), lp.top_logprobs[slot, 0].tolist()


def alone(engine, i, new=20):
    engine.insert(0, begun(engine, i, new), logprobs=True)
    found = [told(engine.decode(1), 0) for _ in range(new)]
    engine.cancel(0)
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_a_text_does_not_depend_on_the_others(name):
    """Texts that join and leave at any token, in 2, 4 and 8 rows: tokens and log-probabilities are those alone."""
    engine, new, sizes = engine_of(name), 20, set()
    expected = [alone(engine, i) for i in range(8)]
    assert engine.rows == 2
    found, left = {i: [] for i in range(8)}, {}
    for moment in range(60):
        for i in range(8):
            if moment == 3 * i:
                engine.insert(7 - i, begun(engine, i), logprobs=True)
                left[i] = new
        step = engine.decode(1)
        sizes.add(engine.rows)
        for i in list(left):
            found[i].append(told(step, 7 - i))
            left[i] -= 1
            if not left[i]:
                engine.cancel(7 - i)
                del left[i]
    assert sizes == {2, 4, 8}
    assert len({tuple(t[0] for t in text) for text in expected}) > 4, "the texts must differ"
    for i in range(8):
        assert found[i] == expected[i]


@pytest.mark.parametrize("name", ["state space and control"])
def test_a_text_that_is_parked_goes_on_as_if_it_were_not(name):
    """Out of its slot to the host and into another one: at any token, its prompt half read, and among other rows."""
    engine = engine_of(name)
    expected = alone(engine, 6)
    for other in range(3):
        engine.insert(other, begun(engine, other))
    text = engine.begin(prompt(6), 20, options(6), np.full(2, 6, np.float32))
    text.park()
    engine.prefill(text)
    assert text.unread == 0
    engine.insert(3, text, logprobs=True)
    found, slot = [], 3
    for n in range(20):
        found.append(told(engine.decode(1), slot))
        if n in (0, 7, 13):
            text = engine.take(slot)
            text.park()
            slot = 3 if n == 0 else (slot + 1) % 4
            engine.decode(2)
            engine.cancel(slot)
            engine.insert(slot, text, logprobs=True)
    assert found == expected


def test_one_reading_serves_several_texts():
    engine = engine_of()
    expected = alone(engine, 0)
    text = begun(engine, 0)
    for slot in (0, 1):
        engine.insert(slot, text, logprobs=True)
    steps = [engine.decode(1) for _ in range(20)]
    for slot in (0, 1):
        assert [told(step, slot) for step in steps] == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_log_probabilities_are_those_of_the_model(use_cache):
    """Of the prompt and of what is made, before bias, temperature and limits; equal logits give one number."""
    model = inference_mode(model_of(scale=1.5), True)
    engine = PreparedModel(model, use_cache).engine(2, LENGTH)
    tokens = (np.arange(30) * 7 % 257).tolist()
    text = engine.begin(tokens, 6, SamplingOptions(0.9, top_k=3, seed=2, bias={5: 30.0}, logprobs=True))
    pieces = []
    while text.unread:
        pieces.append(engine.prefill(text, tokens[len(tokens) - text.unread :]))
    engine.insert(0, text, logprobs=True)
    steps = [engine.decode(1) for _ in range(6)]
    made = [int(step.token[0]) for step in steps]
    whole = hax.named(jnp.asarray([tokens + made]), ("batch", "position"))
    logits = eqx.filter_jit(lambda m, t: m(t).rearrange(("batch", "position", "vocab")).array[0])(model, whole)
    expected = np.asarray(jax.nn.log_softmax(logits))
    values = np.concatenate([p.token for p in pieces] + [step.logprobs.token[0, :1] for step in steps])
    # As for logits, see `test_generation`: 1e-5, which the sum over the vocabulary does not make worse.
    np.testing.assert_allclose(values, expected[np.arange(35), (tokens + made)[1:]], atol=1e-5)
    top = np.concatenate([p.top for p in pieces] + [step.logprobs.top[0, :1] for step in steps])
    likeliest = np.concatenate([p.top_logprobs for p in pieces] + [step.logprobs.top_logprobs[0, :1] for step in steps])
    np.testing.assert_allclose(likeliest, -np.sort(-expected[:35])[:, :MOST], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected[:35], top, axis=1), likeliest, atol=1e-5)
    stands = top == np.asarray((tokens + made)[1:])[:, None]
    assert stands.any()
    np.testing.assert_array_equal(likeliest[stands], np.broadcast_to(values[:, None], top.shape)[stands])


def test_bias():
    """A bias of 100 makes a token certain, one of -100 impossible; texts beside it do not notice."""
    engine = engine_of()
    likely = [t[0] for t in alone(engine, 0)]
    for slot, bias in ((0, {9: 100.0}), (1, {})):
        text = engine.begin(prompt(0), 8, SamplingOptions(bias=bias))
        engine.prefill(text)
        engine.insert(slot, text)
    steps = [engine.decode(1) for _ in range(8)]
    assert [int(step.token[0]) for step in steps] == [9] * 8
    free = [int(step.token[1]) for step in steps]
    engine.cancel(0)
    text = engine.begin(prompt(0), 8, SamplingOptions(bias={token: -100.0 for token in set(free)}))
    engine.prefill(text)
    engine.insert(0, text)
    assert not {int(engine.decode(1).token[0]) for _ in range(8)} & set(free)
    assert len(likely) == 20


def test_without_wishes_nothing_is_told():
    engine = engine_of()
    engine.insert(0, begun(engine, 0))
    assert engine.decode(1).logprobs is None


@pytest.mark.parametrize(("drafting", "length"), [(None, 30), (Drafting(1, 3), 6)], ids=["plain", "drafting"])
def test_a_prompt_that_comes_later_disturbs_no_text(drafting, length):
    """Plain: the first text is near the end of its room, where a chunk of another prompt would not fit behind it.
    Drafting: its coarse memory may be a token behind, of which it must not be said that it is read."""
    model = PreparedModel(model_of(scale=2.0), drafting=drafting)
    first, second = (np.arange(n) * 7 % 64 for n in (length, 20))

    def text(others: int) -> list[int]:
        engine = model.engine(2, LENGTH)
        engine.admit(0, first.tolist(), LENGTH - length, SamplingOptions(temperature=1.0, seed=3))
        engine.prefill_all(len(first) - 1)
        for k in range(LENGTH - length):
            if k == others:
                engine.admit(1, second.tolist(), 8, SamplingOptions())
                engine.prefill_all(len(second) - 1)
            engine.decode(1)
        tokens, lengths, complete = engine.read()
        assert complete[0]
        return tokens[0, : lengths[0]].tolist()

    alone = text(-1)
    for others in range(1, 9):
        assert text(others) == alone
