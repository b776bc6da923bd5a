"""Caches that evaluations share: by hand, causal, however the text is cut, in generation with and without drafts."""

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
from support.models import VOCAB, build, change, is_float, llama, random_tokens, small_config

import qkvflow
from qkvflow.axes import BATCH, POSITION
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig, Window
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.generation.forced import read_with_cache
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models.cached import CachedModel
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing

LENGTH, STEPS = 12, 5
CASES = {
    "gpt2": {},
    "sequential, prelude and coda": {"form": "sequential", "prelude_layers": 1, "coda_layers": 1},
    "split": {"form": "split"},
    "llama by Heun": {"block": llama(), "depth": DepthConfig(solver="heun", steps=3)},
    "convolution": {"block": Gpt2BlockConfig(num_heads=2, mlp_scale=2, convolution=4)},
    "recurrence": {"block": SsmBlockConfig(num_heads=2, state_size=4)},
}


@functools.cache
def model_of(name):
    model = build(small_config(**{"depth": DepthConfig(steps=STEPS), **CASES[name]}))
    return inference_mode(jax.tree.map(lambda a: 2 * a if is_float(a) else a, model), True)


@functools.cache
def cached(name, cache):
    return eqx.filter_jit(CachedModel.of)(model_of(name), None, CacheSharing.of(cache))


@eqx.filter_jit
def _window(model, tokens, at, memory):
    Batch, New = tokens.axes
    window = Window(hax.full(Batch, at, dtype=jnp.int32), hax.full(Batch, New.size, dtype=jnp.int32))
    x, memory = model.extend(tokens, Inputs(window=window), memory)
    return model.logits(x).rearrange((BATCH, POSITION, "vocab")).array, memory


def read(model, tokens, cuts=()):
    """Logits [batch, position, vocab], the text read in windows that end at `cuts`."""
    memory, found = model.memory(tokens.resolve_axis(BATCH), LENGTH), []
    for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        piece = hax.named(tokens.array[:, a:b], (tokens.axes[0], hax.Axis(POSITION, b - a)))
        logits, memory = _window(model, piece, a, memory)
        found.append(logits)
    return np.concatenate(found, axis=1)


def by_hand(model, tokens, source, own):
    """Logits, token by token: evaluation e reads keys and values of evaluation source(e), its own of own(e)."""
    flow, steps = model.flow, model.flow.plan.evaluations
    keys: dict = {}
    states = []
    for p in range(LENGTH):
        one = hax.named(tokens.array[:1, p : p + 1], (hax.Axis(BATCH, 1), hax.Axis(POSITION, 1)))
        x = model.embeddings(one, pos_ids=hax.named(jnp.asarray([[p]]), one.axes))
        for e, block in enumerate(flow.blocks):
            parts = block.attn.c_attn(block.attn_ln(x))  # queries, keys, values
            qkv = jnp.stack([part.rearrange(("heads", ..., "head_size")).array for part in parts])
            q, k, v = np.asarray(qkv, np.float64)[:, :, 0, 0]  # [heads, head_size]
            keys[e, p] = k, v
            seen = [keys[source(e), j] for j in range(p)] + [keys[own(e), p]]
            ks, vs = (np.stack([pair[i] for pair in seen], axis=1) for i in (0, 1))  # [heads, position, head_size]
            scores = np.einsum("hd,hpd->hp", q, ks) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hp,hpd->hd", weights / weights.sum(-1, keepdims=True), vs)
            axes = (hax.Axis(BATCH, 1), hax.Axis(POSITION, 1), *block.attn.c_proj.In)
            attn = block.attn.c_proj(hax.named(jnp.asarray(out, jnp.float32)[None, None], axes))
            x = x + (attn + block.mlp(block.mlp_ln(x), Inputs())) / steps
        states.append(model.logits(model.norm(x)).array.reshape(-1))
    return np.stack(states)


@pytest.mark.parametrize(
    ("cache", "source", "own"),
    [
        ("every 2", lambda e: e // 2 * 2, lambda e: e // 2 * 2),
        ("every 3", lambda e: e // 3 * 3, lambda e: e // 3 * 3),
        ("every 99", lambda e: 0, lambda e: 0),
        ("latest", lambda e: STEPS - 1, lambda e: e),
    ],
)
def test_by_hand(cache, source, own):
    model, tokens = cached("gpt2", cache), random_tokens(batch=1)
    expected = by_hand(model, tokens, source, own)
    found = read(model, tokens, tuple(range(1, LENGTH)))[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    exact = read(cached("gpt2", "exact"), tokens)[0]
    assert np.abs(found - exact).max() > 1e-2, "it must be another function than the exact one"


@pytest.mark.parametrize("name", list(CASES))
def test_every_one_is_exact_and_cuts_do_not_matter(name):
    tokens = random_tokens()
    exact = model_of(name)(tokens).rearrange((BATCH, POSITION, "vocab")).array
    np.testing.assert_allclose(read(cached(name, "every 1"), tokens), exact, rtol=2e-5, atol=2e-5)
    whole = read(cached(name, "every 2"), tokens)
    assert np.abs(whole - exact).max() > 1e-3
    for cuts in ((5,), (1, 2, 7)):
        np.testing.assert_allclose(read(cached(name, "every 2"), tokens, cuts), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache", ["every 2", "latest"])
@pytest.mark.parametrize("name", list(CASES))
def test_causal_bit_for_bit(name, cache):
    model, tokens = cached(name, cache), random_tokens()
    before, after = (read(model, t, (4, 8)) for t in (tokens, change(tokens, 6)))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any()


def test_what_is_kept():
    """Keys and values of as many evaluations as are kept; states of recurrences of all."""
    for cache, kept in (("exact", STEPS), ("every 2", 3), ("every 5", 1), ("latest", 1)):
        assert CacheSharing.of(cache).kept(STEPS) == kept
        memory = cached("recurrence", cache).memory(hax.Axis(BATCH, 2), LENGTH)[1]
        shapes = [leaf.shape for leaf in jax.tree.leaves(memory)]
        assert shapes.count((2 * 2, LENGTH, 8)) == 2 * kept
        assert len(shapes) == 2 * kept + STEPS


def test_losses_and_bytes():
    model = model_of("gpt2")
    tokens = random_tokens(batch=3)
    example = LmExample(tokens, hax.ones(tokens.axes).at[POSITION, -1].set(0.0), AttentionMask.causal())
    readings = {
        name: read_with_cache(model, CacheSharing.of(name), [example]) for name in ("exact", "every 2", "latest")
    }
    assert readings["exact"].loss == pytest.approx(model.compute_next_token_loss(example).item(), rel=1e-5)
    assert [r.bytes_per_token for r in readings.values()] == [5 * 128, 3 * 128, 128]
    for name, cuts in (("every 2", ()), ("latest", tuple(range(1, LENGTH)))):
        logits = jax.nn.log_softmax(read(cached("gpt2", name), tokens, cuts)[:, :-1], axis=-1)
        expected = -jnp.take_along_axis(logits, tokens.array[:, 1:, None], axis=-1).mean().item()
        assert readings[name].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "recurrence"])
def test_greedy_texts(name):
    """What is written is what reading it gives; drafts change nothing."""
    block = CASES[name].get("block")
    config = small_config(depth=DepthConfig(steps=STEPS), **({} if block is None else {"block": block}))
    config = dataclasses.replace(config, max_seq_len=LENGTH, hidden_dim=64)
    model = jax.tree.map(lambda a: 3 * a if is_float(a) else a, config.build(VOCAB, key=jax.random.PRNGKey(0)))
    prompt = random_tokens(batch=2, length=4)
    texts = {c: np.asarray(qkvflow.generate(model, prompt, 8, cache=c).array) for c in ("exact", "every 3", "latest")}
    np.testing.assert_array_equal(texts["exact"], qkvflow.generate(model, prompt, 8).array)
    for cache, text in texts.items():
        ready = CachedModel.of(inference_mode(model, True), None, CacheSharing.of(cache))
        Batch, Pos = prompt.axes
        logits = read(ready, hax.named(jnp.asarray(text), (Batch, Pos.resize(LENGTH))), tuple(range(3, LENGTH)))
        np.testing.assert_array_equal(text[:, 4:], logits[:, 3:-1].argmax(-1))
    drafted = qkvflow.generate(model, prompt, 8, cache="every 3", draft_steps=2, draft_tokens=2)
    np.testing.assert_array_equal(drafted.array, texts["every 3"])


def test_refusals():
    model = model_of("gpt2")
    for wrong in ("every", "every 0", "every -1", "every 1.5", "none", 3):
        with pytest.raises(UserError, match="Choices: exact, latest, every N"):
            CacheSharing.of(wrong)
    assert CacheSharing.of(None) == CacheSharing.of("every 1") == EXACT
    latest, exits = CacheSharing.of("latest"), ExitConfig("velocity", 0.1)
    with pytest.raises(UserError, match="cannot be combined"):
        PreparedModel(model, exits=exits, sharing=latest)
    with pytest.raises(UserError, match="draft_steps cannot be combined"):
        qkvflow.generate(model, random_tokens(length=2), 2, cache="latest", draft_steps=2)
    with pytest.raises(UserError, match="leave it out"):
        PreparedModel(model, use_cache=False, sharing=latest)
