"""Laws of LoRA on discretised models: where it starts, what it changes, what merging gives."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.models.gpt2 import Gpt2Config
from levanter.trainer_state import init_optimizer_for_trainables, trainables_only
from levanter.utils.tree_utils import inference_mode
from support.models import VOCAB, build, llama, random_tokens, small_config

import qkvflow
from qkvflow.blocks import SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import lora
from qkvflow.models.levanter_twin import merged
from qkvflow.named import is_named

SLOW = pytest.mark.slow
CONFIGS = {
    "parallel": small_config(),
    "llama": small_config(block=llama("official")),
    "basis": small_config("basis"),
    "surrounded": small_config(form="sequential", prelude_layers=2, depth=DepthConfig(solver="heun", steps=2)),
    "reversible": small_config("modulated", depth=DepthConfig(steps=3, adjoint="reversible")),
    "ssm": small_config(block=SsmBlockConfig(num_heads=2, state_size=4, selective=True)),
}
logits = eqx.filter_jit(lambda model, tokens: model(tokens).array)


@functools.cache
def discretised(name):
    return build(CONFIGS[name]).discretise(4)


@functools.cache
def stirred():
    """The base in parallel form, and LoRA beside it that does something."""
    base, model = adapted(dropout=0.5)
    return base, stir(model)


def adapted(name="parallel", *, dropout=0.0, targets=None):
    """A discretised model, and the same with LoRA as it starts."""
    base = discretised(name)
    return base, lora.add_lora(base, 3, 6.0, dropout, targets, key=jax.random.PRNGKey(5))


def stir(model):
    """The same with B = 0.1 N(0, 1)."""
    keys = iter(jax.random.split(jax.random.PRNGKey(6), 100))

    def change(term):
        noise = 0.1 * hax.random.normal(next(keys), term.lora_B.weight.axes)
        return eqx.tree_at(lambda t: t.lora_B.weight, term, noise)

    return lora._map_lora(change, model)


@pytest.mark.parametrize(
    "name", ["parallel", *(pytest.param(n, marks=SLOW) for n in ("basis", "llama", "surrounded", "ssm"))]
)
def test_it_starts_at_the_base_and_merges_exactly(name):
    base, model = adapted(name)
    tokens = random_tokens()
    expected = logits(base, tokens)
    # The added zeros are exact; XLA fuses the sums around them in another order in some forms.
    np.testing.assert_allclose(logits(model, tokens), expected, atol=0.0 if name == "parallel" else 2e-6, rtol=0)
    for got, weight in zip(jax.tree.leaves(lora.merge(model)), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(got, weight)
    model = stir(model)
    merged, unmerged = lora.merge(model), logits(model, tokens)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert np.abs(unmerged - expected).max() > 1e-2
    np.testing.assert_allclose(logits(merged, tokens), unmerged, atol=1e-5, rtol=1e-5)


def test_the_term_is_that_of_peft():
    """W + (alpha / r) B A with A random, 1/sqrt(In) wide, and B zero; each layer has its own."""
    base, model = adapted(targets=["c_fc"])
    model = stir(model)
    before, after = (m.transformer.blocks.stacked.mlp.c_fc for m in (base, model))
    A, B = after.lora.lora_A.weight, after.lora.lora_B.weight
    assert {a.name: a.size for a in A.axes} == {"layers": 4, "LORA_R": 3, "embed": 16}
    assert A.array.std() == pytest.approx(16**-0.5, rel=0.1)
    assert len(np.unique(np.asarray(A.array[:, 0, 0]))) == 4
    expected = before.weight + 6.0 / 3 * hax.dot(B, A, axis="LORA_R")
    merged = lora.merge(model).transformer.blocks.stacked.mlp.c_fc.weight
    np.testing.assert_allclose(merged.array, expected.rearrange(merged.axes).array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (None, {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        (["c_proj"], {"attn.c_proj", "mlp.c_proj"}),
        (["attn.c_attn", "mlp.c_fc"], {"attn.c_attn", "mlp.c_fc"}),
        (r".*\.attn\..*", {"attn.c_attn", "attn.c_proj"}),
    ],
)
def test_targets(targets, found):
    _, model = adapted(targets=targets)
    trained = trainables_only(model, lora.trainable(model, embeddings=False))
    paths = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(trained)}
    assert {p.split(".stacked.")[1].split(".lora.")[0] for p in paths} == found
    assert all(".lora.lora_A.weight" in p or ".lora.lora_B.weight" in p for p in paths)


@pytest.mark.parametrize("targets", [["q_proj"], ["c_attn", "c_fcc"], r"attn.*", [], r"(", ["lm_head"]])
def test_targets_that_match_nothing_are_refused(targets):
    with pytest.raises(UserError, match=r"target_modules.*(attn\.c_attn|not a regular expression)"):
        adapted(targets=targets)


def test_a_is_drawn_as_asked():
    """`normal` has a deviation of 1/sqrt(In); `uniform`, PEFT's, is within 1/sqrt(In) and sqrt(3) narrower."""
    drawn = {}
    for kind in ("normal", "uniform"):
        model = lora.add_lora(discretised("parallel"), 64, 6.0, 0.0, None, a_init=kind, key=jax.random.PRNGKey(5))
        terms = [x for x in jax.tree.leaves(model, is_leaf=lora.is_lora_param) if lora.is_lora_param(x)]
        scaled = [np.ravel(t.lora_A.weight.array) * hax.axis_size(t.lora_A.In) ** 0.5 for t in terms]
        assert all((t.lora_B.weight.array == 0.0).all() for t in terms)
        assert len({float(x[0]) for x in scaled}) == len(scaled)  # each is drawn anew
        drawn[kind] = np.concatenate(scaled)
    assert drawn["normal"].std() == pytest.approx(1.0, abs=0.05)
    assert drawn["uniform"].std() == pytest.approx(3**-0.5, abs=0.02)
    assert np.abs(drawn["uniform"]).max() <= 1.0
    np.testing.assert_allclose(np.quantile(drawn["uniform"], [0.25, 0.75]), [-0.5, 0.5], atol=0.03)


def test_the_head_is_no_target():
    base, model = adapted("llama")
    assert base.lm_head is not None
    assert model.lm_head is base.lm_head
    assert not any(path.endswith("lm_head") for path in lora.linear_paths(base))


@pytest.mark.parametrize("embeddings", [False, True])
def test_optimizer_state_is_for_what_is_trained(embeddings):
    _, model = adapted()
    mask = lora.trainable(model, embeddings=embeddings)
    trained = trainables_only(model, mask)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    r, d, mlp, layers = 3, 16, 32, 4
    expected = layers * r * ((d + 3 * d) + (d + d) + (d + mlp) + (mlp + d))
    assert count == expected + embeddings * (VOCAB.size + 12) * d
    state = init_optimizer_for_trainables(optax.adam(1e-3), trained)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * count + 1


def test_dropout_draws_a_mask_for_each_layer_and_step():
    _, model = stirred()
    tokens = random_tokens()
    training = inference_mode(model, False)
    with pytest.raises(RuntimeError, match="draw_dropout"):
        training(tokens)
    one, two = (lora.draw_dropout(training, jax.random.PRNGKey(seed)) for seed in (0, 1))
    keys = one.transformer.blocks.stacked.mlp.c_fc.lora.dropout.key_data
    assert {a.name: a.size for a in keys.axes} == {"layers": 4, "random_key": 2}
    assert len(np.unique(np.asarray(keys.array), axis=0)) == 4
    np.testing.assert_array_equal(logits(one, tokens), logits(one, tokens))
    assert np.abs(logits(one, tokens) - logits(two, tokens)).max() > 1e-3
    merged = logits(lora.merge(model), tokens)
    np.testing.assert_allclose(logits(inference_mode(one, True), tokens), merged, atol=1e-5)


def test_dropout_keeps_the_mean_and_its_share():
    drop = lora.LoraDropout(0.25, ()).draw(jax.random.PRNGKey(0))
    x = hax.ones((hax.Axis("batch", 100), hax.Axis("embed", 1000)))
    y = drop(x).array
    # 1e5 draws: standard errors 0.0014 of the share, 0.0018 of the mean.
    assert float((y == 0).mean()) == pytest.approx(0.25, abs=0.006)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.008)


@pytest.mark.parametrize("name", ["parallel", pytest.param("reversible", marks=SLOW)])
def test_gradients_pass_through_dropout(name):
    """To A and B, and as finite differences say: the mask is the same in the forward and the backward pass."""
    _, model = adapted(name, dropout=0.3, targets=["c_fc"])
    model = inference_mode(stir(model), False)
    tokens = random_tokens()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(part, rest):
        drawn = lora.draw_dropout(eqx.combine(part, rest, is_leaf=is_named), jax.random.PRNGKey(0))
        return hax.mean(drawn(tokens, key=jax.random.PRNGKey(1)) ** 2).scalar()

    mask = lora.trainable(model, embeddings=False)
    part = trainables_only(model, mask)
    _, gradient = loss(part, model)
    step = 1e-2
    ahead, back = (
        loss(jax.tree.map(lambda p, g, sign=sign: p + sign * step * g, part, gradient), model)[0] for sign in (1, -1)
    )
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))
    assert float(ahead - back) / (2 * step) == pytest.approx(float(norm), rel=0.02)


def test_it_generates_as_when_it_is_merged():
    """Of a model whose LoRA is not merged, too."""
    _, model = stirred()
    tokens = random_tokens(batch=1, length=5)
    found = qkvflow.generate(model, tokens, max_new_tokens=3)
    np.testing.assert_array_equal(found.array, qkvflow.generate(merged(model), tokens, max_new_tokens=3).array)


def test_levanter_models_take_it_too():
    config = Gpt2Config(num_layers=2, hidden_dim=16, num_heads=2, max_seq_len=12)
    base = config.build(VOCAB, key=jax.random.PRNGKey(0))
    model = inference_mode(lora.add_lora(base, 2, 4.0, 0.1, None, key=jax.random.PRNGKey(1)), True)
    tokens = random_tokens()
    expected = logits(inference_mode(base, True), tokens)
    np.testing.assert_allclose(logits(model, tokens), expected, atol=2e-6)
    mask = lora.trainable(model, embeddings=True)
    assert sum(x.size for x in jax.tree.leaves(trainables_only(model, mask).embeddings)) == (VOCAB.size + 12) * 16
