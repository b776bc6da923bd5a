"""Cached generation is the model itself: equal logits at every position, equal text; batches do not mix sequences."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.adaptor.lora import LoraConfig, loraize, merge_lora_modules
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, WEIGHTS, build, heavy, llama, random_tokens, small_config

import qkvflow
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig, Window
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig
from qkvflow.models.cached import CachedModel
from qkvflow.models.levanter_twin import twin

SSM = SsmBlockConfig(num_heads=2, state_size=4)
SELECTIVE = SsmBlockConfig(num_heads=2, state_size=4, selective=True, form="sequential")
CONVOLVED = Gpt2BlockConfig(num_heads=2, mlp_scale=2, convolution=4)
AROUND = {"prelude_layers": 1, "coda_layers": 1}


def depth(solver="euler", **kwargs):
    return DepthConfig(**{"solver": solver, "steps": 2} | kwargs)


# Each kind of block, weights, solver and surrounding stands in at least one fast case; `slow` has their product.
CASES = {
    "gpt2 rk4 around": {"form": "sequential", "depth": depth("rk4", steps=1), **AROUND},
    "llama heun": {"block": llama(), "depth": depth("heun")},
    "gpt2 basis": {"weights": "basis", "depth": depth(), "embedding_multiplier": 20.0},
    "convolution": {"weights": "basis", "block": CONVOLVED, "depth": depth()},
    "gpt2 split around": {"weights": "basis", "form": "split", "depth": depth(), **AROUND},
    "selective per layer": {"weights": "per_layer", "block": SELECTIVE, "depth": depth()},
    "control reversible": {
        "weights": "modulated",
        "block": SSM,
        "control": ControlConfig(dim=3),
        "depth": depth(adjoint="reversible"),
    },
}
BLOCKS = {
    "parallel": {"form": "parallel"},
    "sequential": {"form": "sequential"},
    "split": {"form": "split"},
    "ssm": {"block": SSM},
    "selective": {"block": SELECTIVE},
    **{f"llama {form}": {"block": llama(form)} for form in ("parallel", "sequential", "split", "official")},
}
PRODUCT = [(block, weights, solver) for block in BLOCKS for weights in WEIGHTS for solver in ("euler", "heun", "rk4")]


def model_of(**case):
    return inference_mode(build(small_config(case.pop("weights", "generated"), **case)), True)


def control_of(model, *axes):
    if model.config.control is None:
        return None
    return hax.random.normal(jax.random.PRNGKey(3), (*axes, Axis("control", model.config.control.dim)))


def logits_by_windows(model, tokens, windows, control=None):
    """Logits at all positions, read in windows of the given sizes."""
    cached = eqx.filter_jit(CachedModel.of)(model)
    Batch = tokens.resolve_axis("batch")

    @eqx.filter_jit
    def extend(cached, new, start, memory, control):
        New = new.resolve_axis("position")
        window = Window(hax.full(Batch, start, jnp.int32), hax.full(Batch, New.size, jnp.int32))
        x, memory = cached.extend(new, Inputs(control=control, window=window), memory)
        return cached.logits(x), memory

    memory, logits, start = cached.memory(Batch, 12), [], 0
    for size in windows:
        span = slice(start, start + size)
        given = None if control is None else control["position", span]
        part, memory = extend(cached, tokens["position", span], jnp.int32(start), memory, given)
        logits.append(part.rearrange(("batch", "position", "vocab")).array)
        start += size
    return jnp.concatenate(logits, axis=1)


def check_logits(model):
    tokens = random_tokens()
    control = control_of(model, *tokens.axes)
    options = {} if control is None else {"control": control}
    expected = eqx.filter_jit(lambda m, t, o: m(t, **o).array)(model, tokens, options)
    # One position at a time, and pieces of a prompt: only two shapes to compile.
    np.testing.assert_allclose(logits_by_windows(model, tokens, [5, 5, 1, 1], control), expected, atol=1e-5)


def greedy_by_hand(model, tokens, new, **options):
    """The text by the definition: argmax of the model's logits at the last position, with nothing remembered."""
    Pos = tokens.resolve_axis("position")
    text = np.pad(tokens.array, ((0, 0), (0, new)))
    logits = eqx.filter_jit(lambda m, t: m(hax.named(t, ("batch", "position")), **options).array)
    for end in range(Pos.size, Pos.size + new):
        text[:, end] = logits(model, jnp.asarray(text))[:, end - 1].argmax(axis=-1)
    return text


HEAVY = ("gpt2 rk4 around", "selective per layer", "llama heun")


@pytest.mark.parametrize("case", [heavy(case) if case in HEAVY else case for case in CASES])
def test_logits_at_every_position(case):
    check_logits(model_of(**CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "weights", "solver"), PRODUCT)
def test_logits_at_every_position_of_every_model(block, weights, solver):
    check_logits(model_of(weights=weights, depth=depth(solver), **BLOCKS[block]))


@pytest.mark.slow
@pytest.mark.parametrize("block", list(BLOCKS))
@pytest.mark.parametrize("solver", ["euler", "heun", "rk4"])
def test_256_greedy_tokens_of_every_model(block, solver):
    """Around the flow, with control, at a length where rounding has had time to grow."""
    config = small_config(depth=depth(solver), control=ControlConfig(dim=3), **AROUND, **BLOCKS[block])
    model = build(dataclasses.replace(config, max_seq_len=272))
    tokens = random_tokens()
    control = control_of(model, tokens.resolve_axis("batch"))
    texts = [qkvflow.generate(model, tokens, 256, control=control, use_cache=c).array for c in (True, False)]
    np.testing.assert_array_equal(*texts)


@pytest.mark.parametrize("count", [48, heavy(256)])
def test_greedy_tokens(count):
    """Against the definition, for the flow and for the same flow discretised."""
    model = build(dataclasses.replace(small_config(), max_seq_len=12 + count))
    tokens = random_tokens()
    expected = greedy_by_hand(inference_mode(model, True), tokens, count)
    assert len(np.unique(expected)) > 8, "the text must not be a single repeated token"
    np.testing.assert_array_equal(qkvflow.generate(model, tokens, count).array, expected)
    np.testing.assert_array_equal(qkvflow.generate(model, tokens, count, use_cache=False).array, expected)
    np.testing.assert_array_equal(qkvflow.generate(model.discretise(), tokens, count).array, expected)


@pytest.mark.slow
def test_merged_lora():
    """LoRA on the blocks of a discretised flow, merged: an ordinary model that generates like any other."""
    model = build(small_config()).discretise(4)
    config = LoraConfig(r=2, alpha=4.0, a_init_mode="random", zero_init_b=False)
    adapted = merge_lora_modules(loraize(model, config, key=jax.random.PRNGKey(1)))
    tokens = random_tokens()["position", 0:4]
    expected = greedy_by_hand(inference_mode(adapted, True), tokens, 8)
    np.testing.assert_array_equal(qkvflow.generate(adapted, tokens, 8).array, expected)
    assert not np.array_equal(qkvflow.generate(model, tokens, 8).array, expected), "the adapter must do something"


@pytest.fixture(scope="module")
def hybrid():
    """Attention, recurrence, control: everything that a sequence could leak into another."""
    return build(small_config("modulated", block=SSM, depth=depth(), control=ControlConfig(dim=3)))


def test_unequal_prompts_equal_one_by_one(hybrid):
    tokens, lengths = random_tokens(batch=3, length=7), [7, 1, 4]
    control = control_of(hybrid, tokens.resolve_axis("batch"))
    options = {"max_new_tokens": 5, "temperature": 1.0, "top_k": 9, "top_p": 0.9}
    together = qkvflow.generate(hybrid, tokens, lengths=lengths, control=control, seed=4, **options)
    for i, n in enumerate(lengths):
        prompt = tokens["batch", i : i + 1]["position", 0:n]
        alone = qkvflow.generate(hybrid, prompt, control=control["batch", i : i + 1], seed=4 + i, **options)
        np.testing.assert_array_equal(alone.array[0], together.array[i, : n + 5])
        np.testing.assert_array_equal(together.array[i, n + 5 :], 0)


def test_control_changes_the_text(hybrid):
    tokens = random_tokens(length=4)
    texts = [qkvflow.generate(hybrid, tokens, 8, control=c).array for c in (None, hax.full(Axis("control", 3), 3.0))]
    assert not np.array_equal(*texts)
    zero = qkvflow.generate(hybrid, tokens, 8, control=hax.zeros(Axis("control", 3)))
    np.testing.assert_array_equal(texts[0], zero.array)


def test_control_along_the_text(hybrid):
    """A control that changes with the position: the model reads it there, prompt and new tokens alike."""
    tokens = random_tokens(batch=1, length=4)
    Text = Axis("position", 12)
    control = control_of(hybrid, Text) * 3
    expected = greedy_by_hand(inference_mode(hybrid, True), tokens, 8, control=control)
    np.testing.assert_array_equal(qkvflow.generate(hybrid, tokens, 8, control=control).array, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_levanter(kind):
    sizes = {"max_seq_len": 24, "hidden_dim": 16, "num_layers": 2, "num_heads": 2}
    llama_sizes = {"num_kv_heads": 1, "intermediate_dim": 24}
    config = Gpt2Config(**sizes) if kind == "gpt2" else LlamaConfig(**sizes, **llama_sizes)
    model = build(config)
    assert twin(model) is not None, "it must be cached"
    tokens = random_tokens(length=8)
    expected = greedy_by_hand(inference_mode(model, True), tokens, 16, attn_mask=causal())
    np.testing.assert_array_equal(qkvflow.generate(model, tokens, 16).array, expected)
    np.testing.assert_array_equal(qkvflow.generate(model, tokens, 16, use_cache=False).array, expected)


def causal():
    from levanter.layers.attention import AttentionMask

    return AttentionMask.causal()


@pytest.mark.slow
def test_levanter_model_without_twin_is_recomputed():
    """What we cannot cache is never cached wrongly."""
    odd = Gpt2Config(max_seq_len=24, hidden_dim=16, num_layers=2, num_heads=2, scale_attn_by_inverse_layer_idx=True)
    model = build(odd)
    assert twin(model) is None
    tokens = random_tokens(length=8)
    expected = greedy_by_hand(inference_mode(model, True), tokens, 4, attn_mask=causal())
    np.testing.assert_array_equal(qkvflow.generate(model, tokens, 4).array, expected)


@pytest.mark.slow
def test_continuous_depth_solved_back_in_time_is_cached():
    """`backsolve` is fixed steps forward: its numbers are those of our own loop."""
    check_logits(model_of(depth=depth(steps=3, endpoint="left", adjoint="backsolve")))


def test_stop_token():
    model = build(small_config())
    tokens = random_tokens(length=4)
    text = qkvflow.generate(model, tokens, 8).array
    stop = int(text[0, 6])
    stopped = qkvflow.generate(model, tokens, 8, stop_token=stop).array
    for row, full in zip(stopped, text, strict=True):
        new = list(full[4:])
        end = 4 + new.index(stop) + 1 if stop in new else 12
        np.testing.assert_array_equal(row[:end], full[:end])
        np.testing.assert_array_equal(row[end:], stop)


def test_a_single_sequence_needs_no_batch():
    model, tokens = build(small_config()), random_tokens(length=4)
    alone = qkvflow.generate(model, tokens["batch", 0], 8)
    assert [a.name for a in alone.axes] == ["position"]
    np.testing.assert_array_equal(alone.array, qkvflow.generate(model, tokens, 8).array[0])


def test_the_last_position_is_reached():
    """A text may fill the context to the last position, and not more."""
    model, tokens = build(small_config()), random_tokens(length=4)
    assert qkvflow.generate(model, tokens, 8).axis_size("position") == 12
    with pytest.raises(UserError, match="12 positions"):
        qkvflow.generate(model, tokens, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"lengths": [1]}, "lengths"),
        ({"lengths": [0, 1]}, "lengths"),
        ({"control": hax.zeros(Axis("control", 3))}, "no control"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    model = small_config().build(VOCAB, key=jax.random.PRNGKey(0))
    with pytest.raises(UserError, match=message):
        qkvflow.generate(model, random_tokens(length=4), **{"max_new_tokens": 2} | options)


def test_more_evaluations_than_can_be_compiled_one_by_one():
    model = small_config("constant", depth=DepthConfig(solver="heun", steps=200)).build(
        VOCAB, key=jax.random.PRNGKey(0)
    )
    with pytest.raises(UserError, match=r"400 evaluations .* at most 256 can be cached.*use_cache"):
        qkvflow.generate(model, random_tokens(length=4), 2)
    assert qkvflow.generate(model, random_tokens(length=4), 2, use_cache=False).axis_size("position") == 6


def test_tokens_outside_the_vocabulary():
    model = small_config().build(VOCAB, key=jax.random.PRNGKey(0))
    with pytest.raises(UserError, match="vocabulary"):
        qkvflow.generate(model, random_tokens(length=4) + VOCAB.size, 2)


def test_adaptive_steps_are_refused_with_the_reason():
    model = small_config(depth=DepthConfig(solver="tsit5", rtol=1e-3, steps=4)).build(VOCAB, key=jax.random.PRNGKey(0))
    with pytest.raises(UserError, match=r"whole text.*on_grid"):
        qkvflow.generate(model, random_tokens(length=4), 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_steps": 1, "draft_tokens": 2, "temperature": 1.0},
        {"draft_steps": 1, "draft_tokens": 2, "exit": {"rule": "velocity", "threshold": 0.5}},
    ],
    ids=["plain", "drafts", "drafts and exits"],
)
def test_64_bits_change_no_text_of_an_fp32_model(options):
    """Each step keeps the types of what it is given: numbers that JAX counts in 64 bits then, too."""
    model, tokens = model_of(depth=depth()), random_tokens(length=4)
    texts = qkvflow.generate(model, tokens, 6, **options)
    with jax.enable_x64(True):
        assert qkvflow.generate(model, tokens, 6, **options).array.tolist() == texts.array.tolist()
