"""Generation with the cache: against recomputing the text, along the context, and against Levanter's GPT-2.

- decoding a token at context 128 and at context 1024;
- 512 tokens with the cache, and with the text recomputed for each token (at its own length, rounded up to 64, which is
  less work than `use_cache=False`);
- decoding a token with a discretised flow, and with Levanter's GPT-2 of the same size plus a cache in the style of its
  layers: one scan over stacked blocks, keys and values stacked along the layers.
"""

import functools
import statistics

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionBackend, dot_product_attention
from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
from levanter.utils.tree_utils import inference_mode

from experiments.bench.frame import Benchmark, Call, Rows, interleaved, run, seconds, spread
from experiments.bench.gradients import HEADS, Vocab, build, flow
from qkvflow.generation import Engine, SamplingOptions
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models import NeuralOdeLMHeadModel

WIDTH, LAYERS, MAX_SEQ_LEN = 256, 6, 2048
NEW, ROUNDS = 8, 15  # tokens in one timed run, which continues where the previous one ended
TEXT = 512  # tokens generated in the comparison with recomputation
Batch = hax.Axis("batch", 1)


def prompt(length: int) -> list[int]:
    return (np.arange(length) * 7 % Vocab.size).tolist()


def engine_at(model, context: int, new: int, **options) -> Engine:
    """An engine with the room that `generate` allocates, whose text has `context` tokens and may get `new` more.

    options: of `PreparedModel`.
    """
    engine = PreparedModel(model, **options).engine(1, context + new)
    engine.admit(0, prompt(context), new, SamplingOptions())
    engine.prefill_all(context - 1)
    return engine


def decoding(model, context: int) -> Call:
    """Adds NEW tokens to a text that starts with `context` tokens."""
    engine = engine_at(model, context, NEW * (ROUNDS + 2))
    return lambda: engine.decode(NEW)


def levanter_decoding(model: Gpt2LMHeadModel, context: int) -> Call:
    """The same for Levanter's GPT-2, with the modules of its layers; it has no decoding of its own."""
    Layers = model.config.Layers
    Keys = hax.Axis("key_position", 1024)  # as in qkvflow's engine for such a text
    params, static = eqx.partition(model, eqx.is_array)

    def layer(x: NamedArray, block, k: NamedArray, v: NamedArray, position):
        q, new_k, new_v = block.attn.c_attn(block.ln_1(x)).unbind("qkv")
        k = k.updated_slice({"key_position": position}, new_k.rename({"position": "key_position"}))
        v = v.updated_slice({"key_position": position}, new_v.rename({"position": "key_position"}))
        mask = (hax.arange(Keys) <= position).broadcast_axis(x.resolve_axis("position"))
        axes, backend = ("position", "key_position", "head_size"), AttentionBackend.VANILLA
        x = x + block.attn.c_proj(dot_product_attention(*axes, q, k, v, mask=mask, attn_backend=backend))
        return x + block.mlp(block.ln_2(x), key=None), (k, v)

    def token(params, carry):
        token, position, k, v = carry
        model = eqx.combine(params, static)
        Position = hax.Axis("position", 1)
        pos_ids = hax.named(position[None], Position)
        x = model.embeddings.embed(hax.named(token[:, None], (Batch, Position)), key=None, pos_ids=pos_ids)

        def body(x, block, k, v):
            return layer(x, block, k, v, position)

        x, (k, v) = hax.scan(body, Layers)(x, model.transformer.blocks.stacked, k, v)
        logits = model.embeddings.unembed(model.transformer.ln_f(x))
        return logits.rearrange((Batch, Position, Vocab)).array[:, 0].argmax(-1), position + 1, k, v

    def decode(params, carry):
        return jax.lax.fori_loop(0, NEW, lambda _, carry: token(params, carry), carry)

    axes = (Layers, Batch, model.config.Heads, Keys, model.config.HeadSize)
    step = jax.jit(decode, donate_argnums=1)
    # Zeros stand for the keys of the prompt: their values do not affect the time.
    state = [(jnp.zeros(1, jnp.int32), jnp.int32(context - 1), hax.zeros(axes), hax.zeros(axes))]

    def run():
        state[0] = step(params, state[0])
        return state[0][0]

    return run


def recomputation(model: NeuralOdeLMHeadModel, start: int) -> Rows:
    """Seconds for TEXT tokens after `start`, with the cache, and with the text recomputed for each token."""

    @jax.jit
    def next_token(tokens):
        return model(tokens)["position", -1].array.argmax(-1)

    def reading(length: int) -> float:
        tokens = hax.named(jnp.asarray([prompt(length)]), (Batch, "position"))
        return seconds(lambda: next_token(tokens))

    lengths = [-(-end // 64) * 64 for end in range(start, start + TEXT)]
    each = list(dict.fromkeys(lengths))

    def anew() -> float:
        taken = {length: reading(length) for length in each}
        return sum(taken[length] for length in lengths)

    def cached() -> float:
        engine = engine_at(model, start, TEXT)
        engine.decode(1)
        return seconds(lambda: engine.decode(TEXT - 1)) * TEXT / (TEXT - 1)

    for warm_up in (anew, cached):  # compiles
        warm_up()
    rounds = [(cached(), anew()) for _ in range(7)]  # in turn
    rows = {}
    for k, name in enumerate(("cached", "read anew")):
        middle = statistics.median(own[k] for own in rounds)
        ratios = spread("ratio", [own[k] / own[0] for own in rounds])
        rows[name] = {"seconds": middle, "tokens_per_second": TEXT / middle, **ratios}
    return rows


@functools.cache
def model() -> NeuralOdeLMHeadModel:
    return inference_mode(build(flow(WIDTH, MAX_SEQ_LEN, steps=LAYERS)), True)


def along_the_context() -> Rows:
    return interleaved({f"context {n}": decoding(model(), n) for n in (128, 1024)}, ROUNDS)


def against_levanter() -> Rows:
    config = Gpt2Config(max_seq_len=MAX_SEQ_LEN, hidden_dim=WIDTH, num_heads=HEADS, num_layers=LAYERS)
    theirs = inference_mode(build(config), True)
    calls = {
        "levanter gpt2, scan": levanter_decoding(theirs, 128),
        "levanter gpt2, our engine": decoding(theirs, 128),
        "flow, discretised": decoding(model().discretise(), 128),
    }
    return interleaved(calls, ROUNDS)


SETTINGS = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "batch": 1, "new tokens": NEW}
ANEW = SETTINGS | {"new tokens": TEXT, "prompt": 16}
BENCHMARKS = (
    Benchmark("decoding_along_the_context", SETTINGS, along_the_context),
    Benchmark("decoding_against_levanter", SETTINGS, against_levanter),
    Benchmark("cache_against_recomputation", ANEW, lambda: recomputation(model(), ANEW["prompt"])),
)

if __name__ == "__main__":
    run(BENCHMARKS)
