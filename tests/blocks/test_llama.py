"""Laws of the Llama block: its forms by hand, ordinary layers around it, discretisation, bf16, dropout, refusals."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.utils.activation import ActivationFunctionEnum
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, build, heavy, llama, random_tokens, small_config

from qkvflow.blocks import Inputs, LlamaBlockConfig
from qkvflow.config import decode, encode
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig

FORMS = ("parallel", "sequential", "official")
Embed = hax.Axis("embed", 16)


def noisy_block(form, **kwargs):
    block = llama(form, **kwargs).init(Embed, key=jax.random.PRNGKey(0))
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.PRNGKey(x.size), x.shape) if eqx.is_inexact_array(x) else x,
        block,
    )


@pytest.mark.parametrize("form", FORMS)
def test_block_by_hand(form):
    """The whole block in NumPy: RMSNorm, half-split rotation, grouped causal attention, SwiGLU."""
    block = noisy_block(form)
    x = hax.random.normal(jax.random.PRNGKey(3), (hax.Axis("position", 5), Embed))

    def norm(m, v):
        eps = {"official": 1e-6}.get(form, 1e-5)
        out = v / np.sqrt((v**2).mean(-1, keepdims=True) + eps) * np.asarray(m.weight.array)
        return out + (0 if m.bias is None else np.asarray(m.bias.array))

    def rotate(v):  # {position, heads, head_size}
        half = v.shape[-1] // 2
        angle = np.arange(5)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = v[..., :half], v[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(v):
        w = {n: np.asarray(getattr(block.self_attn, f"{n}_proj").weight.array) for n in "qkvo"}
        q, k, value = (np.einsum("pe,ehs->phs", v, w[n]) for n in "qkv")
        k, value = (np.repeat(a, 2, axis=1) for a in (rotate(k), value))
        scores = np.einsum("phs,khs->hpk", rotate(q), k) / np.sqrt(8)
        scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hpk,khs->phs", p / p.sum(-1, keepdims=True), value)
        return np.einsum("phs,hse->pe", out, w["o"])

    def mlp(v):
        w = {n: np.asarray(getattr(block.mlp, f"{n}_proj").weight.array) for n in ("gate", "up", "down")}
        gate = v @ w["gate"]
        return (gate / (1 + np.exp(-gate)) * (v @ w["up"])) @ w["down"]

    v = np.asarray(x.array, np.float64)
    n1 = norm(block.input_layernorm, v)
    attn = attention(n1)
    mlp_input = {"parallel": v, "sequential": v + attn, "official": n1}[form]
    expected = attn + mlp(norm(block.post_attention_layernorm, mlp_input))
    ours = eqx.filter_jit(lambda b: b(x, Inputs.of()).array)(block)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-6)  # rounding of fp32


def test_bias_of_norms():
    """Only the official block's norms have one, as in its source; the norm before the head never has."""
    for form in FORMS:
        block = llama(form).init(Embed, key=jax.random.PRNGKey(0))
        assert (block.input_layernorm.bias is not None) == (form == "official")
        assert llama(form).norm(Embed).bias is None
        assert block.self_attn.q_proj.bias is None


def test_axes_for_tensor_parallelism():
    block = llama().init(Embed, key=jax.random.PRNGKey(0))
    names = {n: [a.name for a in getattr(block.self_attn, f"{n}_proj").weight.axes] for n in "qkvo"}
    assert names == {
        "q": ["embed", "heads", "head_size"],
        "k": ["embed", "kv_head", "head_size"],
        "v": ["embed", "kv_head", "head_size"],
        "o": ["heads", "head_size", "embed"],
    }


@pytest.mark.parametrize("form", ["official", heavy("parallel"), heavy("sequential")])
def test_prelude_and_coda_are_ordinary_llama_layers(form, tokens):
    """Sequential, without the official block's bias, whatever the form of the flow."""
    model = build(small_config(block=llama(form), prelude_layers=2, coda_layers=1))
    ordinary = model.transformer.prelude.blocks.stacked
    assert ordinary.form == "sequential"
    assert ordinary.input_layernorm.bias is None
    assert ordinary.input_layernorm.eps == 1e-5
    x = model.embeddings(tokens)

    @eqx.filter_jit
    def by_hand(stacked, x):
        for i in range(2):
            block = hax.tree_util.tree_map(
                lambda a, i=i: a["layers", i] if isinstance(a, hax.NamedArray) else a, stacked
            )
            x = x + block.self_attn.extend(block.input_layernorm(x), Inputs.of(), None)[0]
            x = x + block.mlp(block.post_attention_layernorm(x), Inputs.of())
        return x

    ours = eqx.filter_jit(lambda m: m.transformer.prelude(x, Inputs.of()))(model)
    np.testing.assert_allclose(ours.array, by_hand(ordinary, x).array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", ["euler", "rk4"])
@pytest.mark.parametrize("form", FORMS)
def test_discretised_at_the_trained_depth_is_the_same_function(form, solver, tokens):
    model = build(small_config(block=llama(form), depth=DepthConfig(solver=solver, steps=3), coda_layers=1))
    run = eqx.filter_jit(lambda m: m(tokens).array)
    discrete = model.discretise()
    np.testing.assert_allclose(run(discrete), run(model), atol=1e-5)
    fresh = eqx.filter_eval_shape(lambda: discrete.config.build(VOCAB, key=jax.random.PRNGKey(0)))
    assert jax.tree.structure(fresh) == jax.tree.structure(discrete)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_compute(form, tokens):
    model = build(small_config(block=llama(form)))
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, model)
    run = eqx.filter_jit(lambda m: m(tokens))
    logits = run(low)
    assert logits.dtype == jnp.bfloat16
    reference = run(model).array
    # bf16 keeps 8 bits: about 0.4 % per operation, some tens of operations in sequence.
    assert float(jnp.abs(logits.array - reference).max() / jnp.abs(reference).max()) < 0.05


@pytest.mark.parametrize("name", ["embed_pdrop", "resid_pdrop", "attn_pdrop"])
def test_every_dropout_option_acts(name, tokens):
    model = build(small_config(block=llama(**{name: 0.5})))
    plain = inference_mode(model, True)
    run = eqx.filter_jit(lambda m, key: m(tokens, key=key).array)
    key = jax.random.PRNGKey(0)
    assert not np.allclose(run(model, key), run(plain, key))
    np.testing.assert_array_equal(run(plain, key), run(plain, None))


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_vocabulary(tied, tokens):
    model = build(small_config(block=llama(tie_word_embeddings=tied)))
    assert (model.lm_head is None) == tied
    larger = model.resize_vocab(VOCAB.size + 6, key=jax.random.PRNGKey(0))
    assert larger.Vocab.size == VOCAB.size + 6
    run = eqx.filter_jit(lambda m: m(tokens)["vocab", 0 : VOCAB.size].array)
    np.testing.assert_allclose(run(larger), run(model), atol=1e-6)


def test_logits_depend_on_distances_between_tokens_only(tokens):
    """Rotary positions: shifting all of them changes nothing but rounding; stretching them does."""
    model = build(small_config(block=llama(), prelude_layers=1))
    Pos = tokens.resolve_axis("position")
    run = eqx.filter_jit(lambda m, pos_ids: m(tokens, pos_ids=pos_ids).array)
    plain, shifted, stretched = (run(model, p) for p in (hax.arange(Pos), hax.arange(Pos) + 7, 5 * hax.arange(Pos)))
    np.testing.assert_allclose(shifted, plain, atol=1e-5)
    assert not np.allclose(stretched, plain, atol=1e-4)


def test_official_scales():
    """The official Llama draws token embeddings with standard deviation 1 and the head with 0.02."""

    def ends(init, **options):
        config = NeuralOdeConfig(
            max_seq_len=8,
            hidden_dim=64,
            block=llama("official", **options),
            weights=GeneratedConfig(time_embed_dim=4, sinusoidal_dim=4, init=init),
        )
        model = config.build(hax.Axis("vocab", 256), key=jax.random.PRNGKey(0))
        head = model.lm_head and float(jnp.std(model.lm_head.weight.array))
        return float(jnp.std(model.embeddings.token_embeddings.weight.array)), head

    # 16384 samples: the sample deviation is within 2 % of the true one.
    assert ends("official") == pytest.approx((1.0, 0.02), rel=0.02)
    assert ends("matched") == pytest.approx((0.02, 1 / 8), rel=0.03)  # truncation at 3 sigma takes about 1.3 %
    assert ends("official", tie_word_embeddings=True) == (pytest.approx(0.02, rel=0.02), None)


def test_yaml():
    raw = {
        "hidden_dim": 64,
        "block": {
            "type": "llama",
            "num_heads": 4,
            "num_kv_heads": 2,
            "intermediate_dim": 96,
            "form": "official",
            "rope": {"type": "llama3", "theta": 500000.0},
            "tie_word_embeddings": True,
        },
    }
    config = decode(NeuralOdeConfig, raw, "model")
    assert config.block.rope.theta == 500000.0
    again = {k: v for k, v in encode(config).items() if k != "type"}
    assert decode(NeuralOdeConfig, again, "model") == config


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"form": "serial"}, "parallel, sequential, split, official"),
        ({"num_heads": 0}, "`num_heads` must be at least 1"),
        ({"num_heads": 6, "num_kv_heads": 4}, r"num_kv_heads \(4\) must divide num_heads \(6\).*Possible: 1, 2, 3, 6"),
        ({"num_kv_heads": 0}, "`num_kv_heads` must be at least 1"),
        ({"intermediate_dim": 0}, "intermediate_dim"),
        ({"activation": ActivationFunctionEnum.xielu}, "xielu"),
        ({"resid_pdrop": 1.0}, "resid_pdrop"),
    ],
)
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        LlamaBlockConfig(**kwargs)


def test_bad_widths_are_refused():
    with pytest.raises(UserError, match=r"hidden_dim \(18\) must be divisible by block\.num_heads \(4\)"):
        NeuralOdeConfig(hidden_dim=18, block=LlamaBlockConfig(num_heads=4))
    with pytest.raises(UserError, match=r"20 / 4 = 5, .* must be even"):
        NeuralOdeConfig(hidden_dim=20, block=LlamaBlockConfig(num_heads=4))


def test_segments_do_not_see_each_other():
    model = build(small_config(block=llama()))
    mask = AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray([0] * 6 + [1] * 6), "position"))
    run = eqx.filter_jit(lambda tokens: model(tokens, mask).array)
    tokens = random_tokens()
    other = hax.named(tokens.array.at[:, 2].set((tokens.array[:, 2] + 1) % VOCAB.size), tokens.axes)
    np.testing.assert_array_equal(run(tokens)[:, 6:], run(other)[:, 6:])
