"""The ODE flow hybrid: control signals move the field, per sequence, and only where the model has them."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import LmExample
from support.models import VOCAB, build, random_tokens, small_config

from qkvflow.blocks import Inputs
from qkvflow.data.control.sequences import ControlledExample
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig

Control = hax.Axis("control", 3)


def hybrid(weights="constant", **kwargs):
    depth = DepthConfig(steps=4)
    return build(
        small_config(weights, depth=depth, control=ControlConfig(dim=3), prelude_layers=1, coda_layers=1, **kwargs)
    )


def control_of(tokens, seed=0):
    return hax.random.normal(jax.random.PRNGKey(seed), (tokens.resolve_axis("batch"), Control))


@pytest.fixture(scope="module")
def model():
    return hybrid()


@pytest.fixture(scope="module")
def run():
    return eqx.filter_jit(lambda model, tokens, control: model(tokens, control=control).array)


def test_zero_control_is_no_control(model, run, tokens):
    zero = 0 * control_of(tokens)
    np.testing.assert_array_equal(run(model, tokens, zero), run(model, tokens, None))


def test_different_controls_give_different_logits(model, run, tokens):
    a, b = (run(model, tokens, control_of(tokens, seed)) for seed in (0, 1))
    assert float(jnp.abs(a - b).max()) > 1e-3


def test_sequences_do_not_see_each_others_control(model, run, tokens):
    u = control_of(tokens)
    other = hax.named(u.array.at[1].add(1.0), u.axes)
    a, b = run(model, tokens, u), run(model, tokens, other)
    np.testing.assert_array_equal(a[0], b[0])
    assert not np.array_equal(a[1], b[1])


def test_control_along_the_sequence_is_causal(model, run, tokens):
    u = control_of(tokens).broadcast_axis(tokens.resolve_axis("position"))
    same = run(model, tokens, control_of(tokens))
    np.testing.assert_allclose(run(model, tokens, u), same, atol=1e-5)
    u = u.rearrange(("batch", "position", "control"))
    later = hax.named(u.array.at[:, 5].add(1.0), u.axes)
    a, b = run(model, tokens, u), run(model, tokens, later)
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    assert not np.array_equal(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize("with_control", [False, True])
def test_causality(model, run, with_control):
    tokens = random_tokens()
    other = hax.named(tokens.array.at[:, 6].set((tokens.array[:, 6] + 1) % VOCAB.size), tokens.axes)
    u = control_of(tokens) if with_control else None
    a, b = run(model, tokens, u), run(model, other, u)
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    assert not np.array_equal(a[:, 6:], b[:, 6:])


def test_the_field_follows_its_formula(model, tokens):
    """alpha B(x + s(t) + C u), by hand, at one time."""

    from qkvflow.weights import at

    x, u = model.embeddings(tokens), control_of(tokens)
    field = at(model.transformer.flow.weights, 0.5)
    net = model.transformer.flow.weights.shift.net
    hidden = 0.5 * net.lin1.weight.array[0] + net.lin1.bias.array
    shift = jax.nn.silu(hidden) @ net.lin2.weight.array + net.lin2.bias.array
    moved = x.array + shift[None, None] + (u.array @ field.control.weight.array)[:, None, :]
    expected = field.block(hax.named(moved, x.axes), Inputs.of()).array * float(field.alpha.array)
    np.testing.assert_allclose(field(x, Inputs.of(control=u)).array, expected, atol=1e-5)


@pytest.mark.parametrize("weights", ["constant", "generated", "per_layer"])
def test_discretised(weights, run, tokens):
    model, u = hybrid(weights), control_of(tokens)
    discrete = model.discretise()
    np.testing.assert_allclose(run(discrete, tokens, u), run(model, tokens, u), atol=1e-5)
    fresh = discrete.config.build(VOCAB, key=jax.random.PRNGKey(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(discrete)


def test_the_loss_hears_the_control_of_its_example(model, run, tokens):
    u = control_of(tokens).broadcast_axis(tokens.resolve_axis("position")).rearrange(("batch", "position", "control"))
    weight = hax.named(jnp.ones(tokens.array.shape).at[:, -1].set(0), tokens.axes)
    log_p = jax.nn.log_softmax(run(model, tokens, u)[:, :-1])
    expected = -jnp.take_along_axis(log_p, tokens.array[:, 1:, None], axis=-1).mean()
    loss = model.compute_next_token_loss(ControlledExample(tokens, weight, control=u)).scalar()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)  # fp32, summed in another order
    plain = model.compute_next_token_loss(LmExample(tokens, weight)).scalar()
    assert plain == model.compute_next_token_loss(ControlledExample(tokens, weight, control=0 * u)).scalar()
    assert abs(plain - loss) > 1e-4


def test_alpha_starts_as_configured():
    config = dataclasses.replace(small_config("constant"), control=ControlConfig(dim=3, alpha=0.25))
    assert float(config.build(VOCAB, key=jax.random.PRNGKey(0)).transformer.flow.weights.alpha.array) == 0.25


def test_refusals(model, tokens):
    with pytest.raises(UserError, match="no control"):
        build(small_config())(tokens, control=control_of(tokens))
    with pytest.raises(UserError, match="size 3"):
        model(tokens, control=hax.zeros((tokens.resolve_axis("batch"), hax.Axis("control", 5))))
    with pytest.raises(UserError, match="axes of the tokens"):
        model(tokens, control=hax.zeros((hax.Axis("batch", 9), Control)))
    with pytest.raises(UserError, match="at least 1"):
        ControlConfig(dim=0)
