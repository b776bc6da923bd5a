"""Laws of modulated weights: the formula, FiLM is constant at the start, frozen gates know no time."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from support.models import build, small_config

from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.errors import UserError
from qkvflow.time import grid, sinusoidal_features
from qkvflow.weights import ModulatedConfig, at
from qkvflow.weights.modulated import modulate
from qkvflow.weights.variation import variation

Embed = Axis("embed", 16)
BLOCK = Gpt2BlockConfig(num_heads=2)


def arrays(module):
    return jax.tree.leaves(eqx.filter(module, eqx.is_array))


def noisy(module):
    keys = iter(jax.random.split(jax.random.PRNGKey(3), 500))
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape) if eqx.is_inexact_array(x) else x, module
    )


def test_film_is_the_ordinary_block_at_the_start():
    block = BLOCK.init(Embed, key=jax.random.PRNGKey(0))
    modulated = modulate(block, 8, 4, gate="film", key=jax.random.PRNGKey(1))
    for t in (0.0, 0.3, 1.0):
        for a, b in zip(arrays(at(modulated, t)), arrays(block), strict=True):
            np.testing.assert_array_equal(a, b)


def test_sigmoid_starts_near_the_ordinary_block():
    """Gates start near 1/2 (logits of deviation 0.2) and the base twice as large for each of its gates."""
    block = BLOCK.init(Embed, key=jax.random.PRNGKey(0))
    ours = at(modulate(block, 8, 4, key=jax.random.PRNGKey(1)), 0.4).mlp.c_fc.weight
    ratio = np.asarray(ours.array) / np.asarray(block.mlp.c_fc.weight.rearrange(ours.axes).array)
    assert abs(ratio.mean() - 1) < 0.1
    assert ratio.std() < 0.3


@pytest.mark.parametrize("gate", ["sigmoid", "film"])
def test_the_formula(gate):
    block = noisy(modulate(BLOCK.init(Embed, key=jax.random.PRNGKey(0)), 8, 4, gate=gate, key=jax.random.PRNGKey(1)))
    unit, t = block.mlp.c_fc, 0.7
    phi = np.asarray(sinusoidal_features(t, 4).array, np.float64)
    hidden = phi @ np.asarray(unit.net.lin1.weight.array) + np.asarray(unit.net.lin1.bias.array)
    hidden = hidden / (1 + np.exp(-hidden))

    def gate_of(name):
        linear = unit.net.lin2[name]
        logit = hidden @ np.asarray(linear.weight.array) + np.asarray(linear.bias.array)
        return 1 / (1 + np.exp(-logit)) if gate == "sigmoid" else 1 + np.tanh(logit)

    base = np.asarray(unit.base.weight.array)  # {embed, mlp}
    ours = at(block, t).mlp.c_fc
    expected = base * gate_of("in")[:, None] * gate_of("out")[None, :]
    np.testing.assert_allclose(ours.weight.array, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(ours.bias.array, unit.base.bias.array * gate_of("out"), rtol=2e-5, atol=1e-6)


def test_gates_depend_on_time_unless_frozen():
    moving = noisy(modulate(BLOCK.init(Embed, key=jax.random.PRNGKey(0)), 8, 4, key=jax.random.PRNGKey(1)))
    frozen = noisy(
        modulate(BLOCK.init(Embed, key=jax.random.PRNGKey(0)), 8, 4, frozen_time=0.5, key=jax.random.PRNGKey(1))
    )
    a, b = (at(moving, t).mlp.c_fc.weight.array for t in (0.1, 0.9))
    assert float(jnp.abs(a - b).max()) > 1e-3
    a, b = (at(frozen, t).mlp.c_fc.weight.array for t in (0.1, 0.9))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(a, at(moving, 0.5).mlp.c_fc.weight.array, rtol=1e-6, atol=1e-7)
    stacked = at(frozen, grid([0.1, 0.9])).mlp.c_fc.weight
    assert stacked.resolve_axis("layers").size == 2
    assert all(value == 0.0 for value in variation(frozen, (0.1, 0.9)).values())


@pytest.mark.parametrize("evaluate", ["batched", "in_scan"])
def test_discretised_is_the_forward(evaluate, tokens):
    from qkvflow.depth import DepthConfig

    depth = DepthConfig(steps=4, step_size="residual", evaluate=evaluate)
    model = build(small_config("modulated", form="sequential", depth=depth))
    run = eqx.filter_jit(lambda m: m(tokens).array)
    np.testing.assert_allclose(run(model.discretise()), run(model), atol=1e-5)


def test_parameter_count():
    """Shared weights once, and for each module a gate network: (2S+1)H + H, and (H+1) per number that it scales."""
    d, H, S, mlp = 16, 8, 4, 2
    model = build(small_config(ModulatedConfig(hidden_dim=H, sinusoidal_dim=S)))
    linears = ((d, 3 * d), (d, d), (d, mlp * d), (mlp * d, d))
    hidden = (2 * S + 1) * H + H
    expected = sum(i * o + o + hidden + (H + 1) * (i + o) for i, o in linears) + 2 * (2 * d + hidden + (H + 1) * d)
    counted = sum(x.size for x in arrays(model.transformer.flow.weights))
    assert counted == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"hidden_dim": 0}, "hidden_dim"), ({"gate": "relu"}, "film"), ({"frozen_time": 2.0}, "frozen")],
)
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        ModulatedConfig(**kwargs)


def test_axes_are_those_of_the_block():
    stacked = at(
        noisy(modulate(BLOCK.init(Embed, key=jax.random.PRNGKey(0)), 8, 4, key=jax.random.PRNGKey(1))), grid([0.5])
    )
    assert [a.name for a in stacked.attn.c_attn.weight.axes] == ["layers", "embed", "qkv", "heads", "head_size"]
    assert isinstance(stacked.attn_ln.weight, hax.NamedArray)
