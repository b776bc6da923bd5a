"""The language model as Levanter sees it: masks, dropout, dtype, vocabulary, configuration."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax.nn.scan import Stacked
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmExample, LmHeadModel
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, WEIGHTS, build, change, random_tokens, small_config

from qkvflow.blocks import BlockConfig, Gpt2BlockConfig, Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel

DROPOUT = Gpt2BlockConfig(num_heads=2, mlp_scale=2, embed_pdrop=0.2, resid_pdrop=0.2, attn_pdrop=0.2)


def test_registered_with_levanter():
    assert LmConfig.get_choice_class("neuralode") is NeuralOdeConfig
    assert issubclass(NeuralOdeLMHeadModel, LmHeadModel)


def test_no_mask_means_causal(tokens):
    model = build(small_config())
    np.testing.assert_array_equal(model(tokens).array, model(tokens, AttentionMask.causal()).array)


@pytest.mark.parametrize("form", ["parallel", "sequential", "split"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_changed_token_moves_no_logit_before_it(weights, form, tokens):
    """Bit for bit, in the flow and in the ordinary model that it becomes; and it moves those from it on."""
    flow = build(small_config(weights, form))
    logits = eqx.filter_jit(lambda model, tokens: model(tokens).array)
    for model in (flow, flow.discretise()):
        before, after = logits(model, tokens), logits(model, change(tokens, 7))
        np.testing.assert_array_equal(before[:, :7], after[:, :7])
        assert (before[:, 7:] != after[:, 7:]).any(axis=-1).all()


def test_discretised_is_an_ordinary_language_model(tokens):
    discrete = build(small_config()).discretise(4)
    assert isinstance(discrete, LmHeadModel)
    assert isinstance(discrete.transformer.blocks, Stacked)
    assert discrete.config.build(VOCAB, key=jax.random.PRNGKey(0)).transformer.blocks.Block.size == 4
    # Its configuration builds a model of the same structure, so a checkpoint of it can be read back.
    fresh = discrete.config.build(VOCAB, key=jax.random.PRNGKey(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(discrete)
    # Trainable on its own: gradients reach every block.
    example = LmExample.causal(tokens["batch", 0])
    grads = eqx.filter_grad(lambda m: m.compute_next_token_loss(example).scalar())(discrete)
    weight = grads.transformer.blocks.stacked.mlp.c_fc.weight.array
    assert (jnp.abs(weight).max(axis=(1, 2)) > 0).all()


def test_flow_has_no_stack_of_blocks():
    with pytest.raises(UserError, match=r"discretise\(steps\)"):
        _ = build(small_config()).transformer.blocks


@pytest.mark.parametrize("solver", ["euler", "rk4"])
def test_dropout(tokens, solver):
    model = build(small_config(block=DROPOUT, depth=DepthConfig(solver=solver, steps=2)))
    run = eqx.filter_jit(lambda m, key: m(tokens, key=key).array)
    a, again, b = (run(model, jax.random.PRNGKey(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(a, again)
    assert not np.array_equal(a, b)
    evaluation = inference_mode(model, True)
    np.testing.assert_array_equal(run(evaluation, jax.random.PRNGKey(0)), run(evaluation, None))
    with pytest.raises(RuntimeError, match="key"):
        model(tokens)


@pytest.mark.parametrize("name", ["embed_pdrop", "resid_pdrop", "attn_pdrop"])
def test_every_dropout_option_acts(tokens, name):
    block = Gpt2BlockConfig(num_heads=2, **{name: 0.5})
    model = build(small_config(block=block))
    plain = inference_mode(model, True)
    assert not np.allclose(model(tokens, key=jax.random.PRNGKey(0)).array, plain(tokens).array)


def test_one_dropout_mask_per_step_shared_by_its_stages():
    """With a field that drops out its input, Heun's two stages must see the same mask."""

    Embed = hax.Axis("embed", 64)
    drop = hax.nn.Dropout(0.5)
    seen = []

    def field(t, x, args, key):
        mask = drop(hax.ones(Embed), key=key)
        jax.debug.callback(lambda m: seen.append(np.asarray(m)), mask.array, ordered=True)
        return mask

    plan = DepthConfig(solver="heun", steps=2, adjoint="direct").plan("in_scan")
    solution = plan.solve(field, lambda params, t: t, None, hax.zeros(Embed), key=jax.random.PRNGKey(0))
    solution.end.array.block_until_ready()
    jax.effects_barrier()
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[2], seen[3])
    assert not np.array_equal(seen[0], seen[2])


def test_bf16_compute(tokens):
    model = build(small_config())
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, model)
    logits = low(tokens)
    assert logits.dtype == jnp.bfloat16
    reference = model(tokens).array
    # bf16 keeps 8 bits: about 0.4 % per operation, some tens of operations in sequence.
    assert float(jnp.abs(logits.array - reference).max() / jnp.abs(reference).max()) < 0.05


def test_resize_vocab(tokens):
    model = build(small_config())
    larger = model.resize_vocab(VOCAB.size + 6, key=jax.random.PRNGKey(0))
    assert larger.Vocab.size == VOCAB.size + 6
    np.testing.assert_allclose(larger(tokens)["vocab", 0 : VOCAB.size].array, model(tokens).array, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class _OneForm(BlockConfig):
    """A user's block, without the key `form`."""

    learned_positions: ClassVar[bool] = True
    tie_word_embeddings: ClassVar[bool] = True
    inner: ClassVar[Gpt2BlockConfig] = Gpt2BlockConfig(num_heads=2)

    def init(self, Embed, *, key):
        return self.inner.init(Embed, key=key)

    def norm(self, Embed):
        return self.inner.norm(Embed)

    def check(self, Embed):
        self.inner.check(Embed)

    def flops_per_token(self, hidden_dim, context_length):
        return self.inner.flops_per_token(hidden_dim, context_length)


def test_a_block_without_forms_may_have_ordinary_layers_around_it(tokens):
    own = build(small_config(block=_OneForm(), prelude_layers=1))
    ours = build(small_config(block=_OneForm.inner, prelude_layers=1, ordinary_form=_OneForm.inner.form))
    np.testing.assert_array_equal(own(tokens).array, ours(tokens).array)


def test_positions_can_be_given(tokens):
    model = build(small_config())
    long = random_tokens(length=model.config.max_seq_len + 1)
    with pytest.raises(UserError, match="13 tokens, but this model has embeddings of 12 positions"):
        model(long)
    with pytest.raises(UserError, match="13 tokens"):
        eqx.filter_jit(model.activations)(long)
    within = hax.arange(long.resolve_axis("position")) % 12
    assert model(long, pos_ids=within).axis_size("position") == 13
    shifted = model(tokens, pos_ids=hax.arange(tokens.resolve_axis("position")) % 5)
    assert not np.allclose(shifted.array, model(tokens).array)


def test_shorter_sequences_and_no_batch(tokens):
    model = build(small_config())
    single = tokens["batch", 0]["position", 0:5]
    np.testing.assert_allclose(
        model(single).array, model(tokens)["batch", 0]["position", 0:5].array, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_prelude_and_coda_are_ordinary_layers(form):
    config = small_config(prelude_layers=2, coda_layers=1, ordinary_form=form)
    model = build(config)
    assert model.transformer.prelude.blocks.Block.size == 2
    assert model.transformer.coda.blocks.Block.size == 1
    x = random_tokens()
    states = model.transformer.prelude(model.embeddings(x), Inputs.of())
    by_hand = model.embeddings(x)
    for i in range(2):
        block = jax.tree.map(
            lambda a, i=i: a["layers", i] if isinstance(a, hax.NamedArray) else a,
            model.transformer.prelude.blocks.stacked,
            is_leaf=lambda a: isinstance(a, hax.NamedArray),
        )
        attn = block.attn.extend(block.attn_ln(by_hand), Inputs.of(), None)[0]
        seen = by_hand if form == "parallel" else by_hand + attn
        by_hand = by_hand + attn + block.mlp(block.mlp_ln(seen), Inputs.of())
    np.testing.assert_allclose(states.array, by_hand.array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"hidden_dim": 18},
            r"hidden_dim \(18\) must be divisible by block\.num_heads \(12\).* nearest .* is 9",
        ),
        ({"hidden_dim": 0}, "`hidden_dim` must be at least 1"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"prelude_layers": -1}, "prelude_layers"),
        ({"prelude_layers": 1, "ordinary_form": "split"}, "ordinary_form: 'split'.* sequential, parallel"),
        ({"ordinary_form": "parallel"}, "there are none. Set prelude_layers"),
    ],
)
def test_bad_sizes_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        NeuralOdeConfig(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"form": "serial"}, "parallel, sequential, split"),
        ({"mlp_scale": 0}, "mlp_scale"),
        ({"attn_pdrop": 1.5}, "attn_pdrop"),
    ],
)
def test_bad_block_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        Gpt2BlockConfig(**kwargs)
