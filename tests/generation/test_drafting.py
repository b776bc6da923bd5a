"""Drafting changes nothing but the time: greedy texts are equal, drawn texts have the same distribution."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.gpt2 import Gpt2Config
from scipy.stats import chisquare
from support.models import VOCAB, is_float, llama, random_tokens, small_config

import qkvflow
from qkvflow.axes import BATCH, EMBED, POSITION
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig, Window
from qkvflow.blocks.memory import settled, states
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.generation import Drafted, Drafting, SamplingOptions, drafting, rejection
from qkvflow.generation.drafting import DraftedModel
from qkvflow.generation.prepare import PreparedModel
from qkvflow.generation.sampling import Bias, Sampling, choose, log_probabilities
from qkvflow.generation.state import State
from qkvflow.models import ControlConfig
from qkvflow.models.cached import CachedModel
from qkvflow.models.exits import ExitConfig

SIZE, DRAWS = 5, 20_000
SURE, NEVER = 1e-3, 1e-9  # chi-square: what is right is above the first, what is wrong below the second


class Counter(eqx.Module):
    """The interface of `CachedModel` for a chain that is known: its state is the sum of the tokens, modulo SIZE, and a
    state has its row of logits. As with recurrences, the state must go back when tokens do."""

    flow: jax.Array  # [state, vocab]
    exit: None = None

    def memory(self, Batch, length):
        return hax.zeros(Batch, dtype=jnp.int32)

    def extend(self, tokens, inputs, memory):
        New, window = tokens.resolve_axis(POSITION), inputs.window
        sums = hax.cumsum(hax.where(window.real(New), tokens, 0), New)
        states = ((sums + memory) % SIZE).rearrange((BATCH, POSITION))
        x = hax.named(self.flow[states.array], (*states.axes, hax.Axis(EMBED, SIZE)))
        return x, states if window.trial else states[POSITION, -1]

    def logits(self, x):
        return x.rename({EMBED: "vocab"})


def tables():
    """Logits of the chain, and of what drafts for it: alike, but not the same."""
    draw = np.random.default_rng(0)
    p = draw.normal(size=(SIZE, SIZE))
    return p.astype(np.float32), (p + draw.normal(size=p.shape)).astype(np.float32)


def written(options: Sequence[SamplingOptions], new=3, drafts=3) -> np.ndarray:
    """[row, new]: what stands behind the token 0."""
    p, q = map(jnp.asarray, tables())
    model, rows = DraftedModel(Counter(p), q, drafts), len(options)  # pyright: ignore[reportArgumentType]
    state = State.empty(model, rows, 16, 16, None)
    ones = jnp.ones(rows, jnp.int32)
    sampling, bias = jax.tree.map(jnp.asarray, (Sampling.of(options), Bias.of(options)))
    state = state.replace(length=ones, limit=ones + new, sampling=sampling, bias=bias)
    step = jax.jit(lambda state: drafting.add_tokens(model, state, (), None)[0])
    while jnp.any(state.active):
        state = step(state)
    assert (state.length == 1 + new).all()
    return np.asarray(state.text[:, 1 : 1 + new])


def expected(options: SamplingOptions, new=3) -> np.ndarray:
    """Probabilities of all texts of `new` tokens, in their order."""
    bias = np.asarray([options.bias.get(i, 0.0) for i in range(SIZE)], np.float32)
    logits = jnp.asarray(tables()[0] + bias)
    p = np.asarray(jax.nn.softmax(log_probabilities(logits, Sampling.of([options] * SIZE))), np.float64)
    p /= p.sum(axis=1, keepdims=True)
    texts = itertools.product(range(SIZE), repeat=new)
    return np.asarray([np.prod([p[sum(text[:i]) % SIZE, text[i]] for i in range(new)]) for text in texts])


def p_value(found: np.ndarray, probabilities: np.ndarray) -> float:
    """Of texts [row, new] under these probabilities; cells that expect fewer than 5 are taken together."""
    cells = np.ravel_multi_index(tuple(found.T), (SIZE,) * found.shape[1])
    counts, expected = np.bincount(cells, minlength=len(probabilities)), probabilities * len(found)
    if counts[expected == 0].any():
        return 0.0
    few = expected < 5
    counts, expected = (np.append(a[~few], a[few].sum()) for a in (counts, expected))
    kept = expected > 0
    return float(chisquare(counts[kept], expected[kept] * counts.sum() / expected.sum()).pvalue)


OPTIONS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.5},
    "top k": {"temperature": 1.0, "top_k": 3},
    "top p": {"temperature": 1.3, "top_p": 0.8},
    "bias": {"temperature": 1.0, "bias": {1: 1.5, 3: -2.0}},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_distribution_is_that_of_the_full_model(name):
    """The joint distribution of three tokens, of 20,000 texts, with 3, 2, 1 and no drafts beside each other."""
    options = [SamplingOptions(**OPTIONS[name], seed=i, draft_tokens=3 - i % 4) for i in range(DRAWS)]
    assert p_value(written(options), expected(options[0])) > SURE


WRONG = {
    "all stay": lambda stay, behind, count, plain: (count, behind),
    "drawn from p behind one that does not": lambda stay, behind, count, plain: (stay, plain),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_rule_is_seen(name, monkeypatch):
    """The same test fails for a rule that keeps too much, and for one that does not draw from the rest."""
    right = rejection.judge

    def wrong(logits, drafts, log_q, count, sampling, position, active):
        stay, behind = right(logits, drafts, log_q, count, sampling, position, active)
        at = jnp.take_along_axis(logits, stay[:, None, None], axis=1)[:, 0]
        return WRONG[name](stay, behind, count, choose(at, sampling, position + stay, active, stream=5))

    monkeypatch.setattr(drafting, "judge", wrong)
    options = [SamplingOptions(temperature=1.0, seed=i) for i in range(DRAWS)]
    assert p_value(written(options), expected(options[0])) < NEVER


def test_what_is_not_drafted_is_what_it_is_without():
    """A text without drafts has the draws of plain decoding; drafting another way changes draws, not greedy texts."""
    options = [SamplingOptions(temperature=float(i % 2), seed=i, draft_tokens=0) for i in range(64)]
    undrafted = written(options, new=8)
    logits, state = jnp.asarray(tables()[0]), np.zeros(64, int)
    for i in range(8):
        token = np.asarray(choose(logits[state], Sampling.of(options), jnp.full(64, 1 + i)))
        np.testing.assert_array_equal(undrafted[:, i], token)
        state = (state + token) % SIZE
    drafted = [dataclasses.replace(o, draft_tokens=None) for o in options]
    np.testing.assert_array_equal(written(drafted, new=8)[::2], undrafted[::2])
    assert (written(drafted, new=8) != undrafted).any()


def test_equal_distributions_keep_all():
    p = jnp.asarray(tables()[0])
    sampling = Sampling.of([SamplingOptions(temperature=0.7, top_k=4, seed=i) for i in range(SIZE)])
    position, active = jnp.arange(SIZE), jnp.ones(SIZE, bool)
    draft, log_q = rejection.propose(p, sampling, position, active)
    stay, _ = rejection.judge(
        jnp.stack([p, p], axis=1), draft[:, None], log_q[:, None], jnp.ones(SIZE, int), sampling, position, active
    )
    assert (stay == 1).all()


AROUND = {"prelude_layers": 1, "coda_layers": 1}
SELECTIVE = SsmBlockConfig(num_heads=2, state_size=4, selective=True, form="sequential")
MODELS = {
    "gpt2": {},
    "selective around": {"block": SELECTIVE, **AROUND},
    "convolution": {"block": Gpt2BlockConfig(num_heads=2, convolution=4), **AROUND},
    "llama heun": {"block": llama(), "depth": DepthConfig(solver="heun", steps=3)},
    "split": {"weights": "basis", "form": "split"},
    "rk4": {"form": "sequential", "depth": DepthConfig(solver="rk4", steps=2)},
    "control reversible": {
        "weights": "modulated",
        "block": SsmBlockConfig(num_heads=2, state_size=4),
        "control": ControlConfig(dim=3),
        "depth": DepthConfig(steps=4, adjoint="reversible"),
    },
}


def model_of(name, length=352):
    config = small_config(**{"depth": DepthConfig(steps=4), **MODELS[name]})
    config = dataclasses.replace(config, max_seq_len=length)
    model = config.build(VOCAB, key=jax.random.PRNGKey(0))
    # Texts that vary; not by more, since large weights blow up rounding too, most of all along recurrences.
    scale = 2 if isinstance(config.block, SsmBlockConfig) else 4
    return jax.tree.map(lambda a: scale * a if is_float(a) else a, model)


@pytest.mark.parametrize("name", ["selective around", "convolution", "control reversible"])
def test_memory_goes_back(name):
    """A window on trial of which a few tokens stay leaves the states that a window of those alone leaves, bit for
    bit, and the logits behind them."""
    model, tokens = CachedModel.of(model_of(name, 16)), random_tokens(batch=3, length=9)
    Batch, Five = tokens.resolve_axis(BATCH), hax.Axis(POSITION, 5)
    stay = hax.named(jnp.asarray([1, 3, 5]), Batch)

    @functools.partial(jax.jit, static_argnums=3)
    def read(memory, start, count, trial=False):
        piece = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, 5))(tokens.array, start.array)
        inputs = Inputs(window=Window(start, count, trial))
        x, memory = model.extend(hax.named(piece, (Batch, Five)), inputs, memory)
        return x, settled(memory, stay - 1) if trial else memory

    at, five = hax.zeros(Batch, dtype=jnp.int32), hax.full(Batch, 5, dtype=jnp.int32)
    empty = model.memory(Batch, 16)
    tried, expected = read(empty, at, five, True), read(empty, at, stay)
    assert states(tried[1]), "there is something to put back"
    for memory in (tried[1], expected[1]):
        x, after = read(memory, stay.astype(jnp.int32) % 5, hax.ones(Batch, dtype=jnp.int32))
        if memory is tried[1]:
            first = x.array[:, 0], [s.array for s in states(tried[1])], [s.array for s in states(after)]
    second = x.array[:, 0], [s.array for s in states(expected[1])], [s.array for s in states(after)]
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_greedy_texts_are_equal():
    equal_texts("gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_greedy_texts_are_equal_for_all_kinds(name):
    equal_texts(name)


def equal_texts(name):
    """Three texts of 340 tokens, of prompts of different lengths, with a control that changes along them."""
    model, tokens = model_of(name), random_tokens(batch=3, length=9)
    control = None
    if model.config.control is not None:
        axes = (hax.Axis("batch", 3), hax.Axis("position", 100), hax.Axis("control", 3))
        control = hax.random.normal(jax.random.PRNGKey(3), axes)
    given = {"lengths": [9, 1, 4], "control": control}
    expected = qkvflow.generate(model, tokens, 340, **given)
    assert len(np.unique(np.asarray(expected.array))) > 8, "the texts must vary"
    told: list[Drafted] = []
    drafted = qkvflow.generate(
        model, tokens, 340, **given, draft_steps=model.config.depth.steps - 1, draft_tokens=3, report=told.append
    )
    np.testing.assert_array_equal(drafted.array, expected.array)
    assert told[0].tokens == 3 * 340 == told[0].passes + told[0].accepted
    assert 10 < told[0].accepted < told[0].proposed - 10, "some drafts stay, and some do not"


def test_a_text_ends_where_it_would():
    """At a token that ends it, be it drafted or not, and at its full length."""
    model, tokens = model_of("gpt2", 64), random_tokens(batch=2, length=5)
    plain = np.asarray(qkvflow.generate(model, tokens, 40).array)
    for stop in (int(plain[0, 5 + 3]), int(plain[1, 5 + 20])):
        expected = qkvflow.generate(model, tokens, 40, stop_token=stop)
        found = qkvflow.generate(model, tokens, 40, stop_token=stop, draft_steps=3)
        np.testing.assert_array_equal(found.array, expected.array)


def begun(engine, i):
    tokens = (np.arange(3 + 2 * i) * 7 % 64).tolist()
    text = engine.begin(tokens, 24, options_of(i), np.full(2, i, np.float32) if engine._control_dim else None)
    while text.unread:
        engine.prefill(text)
    return text


def options_of(i):
    """Of many kinds, drafts of all numbers too."""
    kinds = ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5})
    return SamplingOptions(**kinds[i % 4], seed=i, logprobs=True, draft_tokens=(None, 1, 0, 2)[i // 2])


def told(step, slot):
    lp = step.logprobs
    return [(token, float(lp.token[at]), lp.top[at].tolist()) for token, _, at in step.added(slot)]


def alone(engine, i):
    engine.insert(0, begun(engine, i), logprobs=True)
    found = []
    while len(found) < 24:
        found += told(engine.decode(1), 0)
    engine.cancel(0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "state space and control"])
def test_a_text_does_not_depend_on_the_others(name):
    """Each with its own acceptance, texts that join, leave, are parked: tokens and log-probabilities bit for bit."""
    hybrid = {"block": SsmBlockConfig(num_heads=2, state_size=16), "control": ControlConfig(dim=2)}
    config = small_config(depth=DepthConfig(steps=3), **(hybrid if name != "attention" else {}))
    config = dataclasses.replace(config, max_seq_len=64, hidden_dim=256 if name == "attention" else 16)
    model = config.build(VOCAB, key=jax.random.PRNGKey(0))
    model = jax.tree.map(lambda a: 4 * a if is_float(a) else a, model)
    engine = PreparedModel(model, drafting=Drafting(2, 3)).engine(8, 64, elastic=True)
    expected = [alone(engine, i) for i in range(8)]
    found: dict[int, list] = {i: [] for i in range(8)}
    parked = {}
    for moment in range(60):
        for i in range(8):
            if moment == 2 * i:
                engine.insert(7 - i, begun(engine, i), logprobs=True)
            if moment == 2 * i + 3 and len(found[i]) < 24:
                parked[i] = engine.take(7 - i)
                parked[i].park()
            if moment == 2 * i + 5 and i in parked:
                engine.insert(7 - i, parked.pop(i), logprobs=True)
        step = engine.decode(1)
        for i in range(8):
            found[i] += told(step, 7 - i)
            if step.complete[7 - i]:
                engine.cancel(7 - i)
    assert len({tuple(t[0] for t in text) for text in expected}) > 4, "the texts must differ"
    for i in range(8):
        assert found[i] == expected[i]


def test_refusals():
    model, tokens = model_of("gpt2", 64), random_tokens(length=4)
    cases = [
        ({"draft_steps": 4}, "draft_steps must be below the 4 steps"),
        ({"draft_steps": 0}, "at least 1"),
        ({"draft_steps": 2, "draft_tokens": 0}, "between 1 and 64"),
        ({"draft_steps": 2, "draft_tokens": 65}, "between 1 and 64"),
        ({"draft_tokens": 2}, "draft_steps is missing"),
        ({"draft_steps": "3"}, "draft_steps must be a whole number, got '3'"),
        ({"draft_steps": True}, "draft_steps must be a whole number, got True"),
        ({"draft_steps": 2, "draft_tokens": 2.5}, "draft_tokens must be a whole number, got 2.5"),
        ({"draft_steps": 2, "use_cache": False}, "needs its cache"),
        ({"report": print}, "pass draft_steps or exit"),
    ]
    for options, words in cases:
        with pytest.raises(UserError, match=words):
            qkvflow.generate(model, tokens, 4, **options)
    with pytest.raises(UserError, match="draft_tokens must be a whole number"):
        SamplingOptions(draft_tokens=-1)
    assert Drafting.of(np.int64(3), np.int64(2)) == Drafting(3, 2)
    layers = Gpt2Config(max_seq_len=64, hidden_dim=16, num_heads=2, num_layers=4).build(
        VOCAB, key=jax.random.PRNGKey(0)
    )
    with pytest.raises(UserError, match="leave draft_steps out for a model that is not a flow"):
        PreparedModel(layers, drafting=Drafting(2))
    with pytest.raises(UserError, match="leave exit out for a model that is not a flow"):
        PreparedModel(layers, exits=ExitConfig("kl", 0.1))


def test_lengths_are_checked_before_the_weights_are_evaluated(monkeypatch):
    def work(*_):
        raise AssertionError

    monkeypatch.setattr(sys.modules["qkvflow.generation.generate"], "PreparedModel", work)
    with pytest.raises(UserError, match="64 positions"):
        qkvflow.generate(model_of("gpt2", 64), random_tokens(length=4), 61)
