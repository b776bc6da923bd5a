"""The forms of a block agree where they should: B_0 is the parallel field, B_1 the ordinary layer, B_h between them."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from support.models import llama, random_tokens

from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig

BLOCKS = {
    "gpt2": Gpt2BlockConfig(num_heads=2, mlp_scale=2),
    "llama": llama(),
    "ssm": SsmBlockConfig(num_heads=2, state_size=4, selective=True),
}
HALVES = {
    "gpt2": ("attn_ln", "attn", "mlp_ln", lambda block, x, inputs: block.mlp(x, inputs)),
    "llama": (
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        lambda block, x, inputs: block.mlp(x, inputs),
    ),
    "ssm": ("attn_ln", "attn", "ssm_ln", lambda block, x, inputs: block.ssm.extend(x, inputs, None)[0]),
}
Embed = hax.Axis("embed", 16)
X = hax.random.normal(jax.random.PRNGKey(2), (*random_tokens().axes, Embed))


def drawn(kind, form):
    return dataclasses.replace(BLOCKS[kind], form=form).init(Embed, key=jax.random.PRNGKey(1))


@eqx.filter_jit
def field(block, inputs, x=X):
    return block(x, inputs).rearrange(x.axes)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("h", "form"), [(0.0, "parallel"), (1.0, "sequential")])
def test_the_ends_are_the_other_forms(kind, h, form):
    """Bit for bit; and no length of a step is that of the ODE itself."""
    split, other = drawn(kind, "split"), drawn(kind, form)
    expected = field(other, Inputs.of()).array
    np.testing.assert_array_equal(field(split, Inputs.of().in_step(h)).array, expected)
    assert np.array_equal(field(split, Inputs.of()).array, expected) == (h == 0.0)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("form", ["parallel", "sequential"])
def test_other_forms_do_not_read_the_step(kind, form):
    block = drawn(kind, form)
    assert not dataclasses.replace(BLOCKS[kind], form=form).depends_on_step
    np.testing.assert_array_equal(field(block, Inputs.of().in_step(0.5)).array, field(block, Inputs.of()).array)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_step_is_two_halves_one_after_the_other(kind):
    """x' = x + h attn(norm1(x)),  x + h B_h(x) = x' + h second(norm2(x'))."""
    h, inputs = 0.25, Inputs.of()
    block, (norm1, attention, norm2, second) = drawn(kind, "split"), HALVES[kind]

    @eqx.filter_jit
    def by_hand(block, x):
        x = x + h * getattr(block, attention).extend(getattr(block, norm1)(x), inputs, None)[0]
        return (x + h * second(block, getattr(block, norm2)(x), inputs)).rearrange(X.axes)

    whole = X + h * field(block, inputs.in_step(h))
    np.testing.assert_allclose(whole.array, by_hand(block, X).array, atol=1e-6)
    apart = X + h * field(block, inputs)
    assert np.abs(apart.array - whole.array).max() > 1e-3, "the parallel field is another one"
