"""Learning rates of generated weights: by how much a step of Adam moves W(t)."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import build, small_config

from qkvflow.config import decode, encode
from qkvflow.errors import Notice, UserError
from qkvflow.models.generated_scale import sum_of_features
from qkvflow.runs.adam import ScaledAdamConfig
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.time import grid
from qkvflow.training.checks import check_config
from qkvflow.weights import Generated, GeneratedConfig, at

RATE = 1e-3


def weights_of(**options):
    """The weights of one GPT-2 block, without the block: W(t) is all that the rule is about."""
    return build(small_config(GeneratedConfig(sinusoidal_dim=4, **options))).transformer.flow.weights


def step(weights, gradients=None, **options):
    """The weights after the first step of Adam at a constant rate, towards smaller W(t)."""
    config = ScaledAdamConfig(
        learning_rate=RATE, warmup=0, lr_schedule="constant", max_grad_norm=None, **{"weight_decay": 0.0} | options
    )
    optimizer = config.build(10)
    params, static = eqx.partition(weights, eqx.is_inexact_array)

    @jax.jit
    def moved(params):
        def loss(p):
            leaves = jax.tree.leaves(at(eqx.combine(p, static), grid([0.0, 0.4, 1.0])))
            return sum(jnp.square(leaf).sum() for leaf in leaves)

        found = jax.grad(loss)(params) if gradients is None else gradients
        updates, _ = optimizer.update(found, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return eqx.combine(moved(params), static)


@pytest.mark.parametrize("dim", [4, 64])
def test_generated_weights_move_as_far_as_ordinary_ones(dim):
    """Adam's first step moves each entry of an ordinary matrix by the rate: so it moves W(t) at most, on the mean over
    t, whatever T is; without the rule up to sum |e| times as far."""
    weights = weights_of(time_embed_dim=dim)
    times = grid(np.linspace(0, 1, 33))

    def motion(**options):
        after = step(weights, **options)
        # The projection's share: the same base and time network before and after.
        kept = eqx.tree_at(
            lambda w: w.mlp.c_fc.leaves.weight.projection, weights, after.mlp.c_fc.leaves.weight.projection
        )
        new, old = (at(w.mlp.c_fc, times).weight.array for w in (kept, weights))
        return float(jnp.abs(new - old).mean()) / RATE

    total = float(sum_of_features(weights.mlp.c_fc))
    plain, scaled = motion(), motion(generated_scale="sum_e")
    assert scaled == pytest.approx(plain / total, rel=1e-3)
    assert 0.2 < scaled <= 1.0 + 1e-3


def test_nothing_else_is_scaled():
    weights = weights_of()
    plain, scaled = step(weights), step(weights, generated_scale="sum_e")
    before = jax.tree_util.tree_leaves_with_path(eqx.filter(plain, eqx.is_array))
    for (path, a), b in zip(before, jax.tree.leaves(eqx.filter(scaled, eqx.is_array)), strict=True):
        is_projection = "projection" in jax.tree_util.keystr(path)
        assert np.array_equal(a, b) != is_projection, path


def test_decay_is_not_scaled():
    """With a gradient of zero only the decay is left: the same for both."""
    weights = weights_of()
    zero = jax.tree.map(jnp.zeros_like, eqx.filter(weights, eqx.is_inexact_array))
    found = [
        jax.tree.leaves(eqx.filter(step(weights, zero, weight_decay=0.1, generated_scale=choice), eqx.is_array))
        for choice in ("none", "sum_e")
    ]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_frozen_time_has_its_own_sum():
    unit = weights_of(time_embed_dim=6, frozen_time=0.5).mlp.c_fc
    assert isinstance(unit, Generated)
    assert float(sum_of_features(unit)) == pytest.approx(float(jnp.abs(unit.net(0.5).array).sum()), rel=1e-6)


def test_configuration():
    raw = {"model": {"type": "gpt2"}, "optimizer": {"type": "adam", "generated_scale": "sum_e", "learning_rate": 1e-3}}
    config = decode(TrainConfig, raw)
    assert config.optimizer.generated_scale == "sum_e"
    assert encode(config)["optimizer"]["generated_scale"] == "sum_e"
    assert encode(decode(TrainConfig, {"model": {"type": "gpt2"}}))["optimizer"]["type"] == "adam"
    with pytest.raises(UserError, match="Choices"):
        decode(TrainConfig, {"model": {"type": "gpt2"}, "optimizer": {"generated_scale": "half"}})
    with pytest.raises(UserError, match="skip_bad_steps"):
        ScaledAdamConfig(generated_scale="sum_e", skip_bad_steps=True)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"type": "generated"}, "sum_e"),
        ({"type": "generated", "init": "official"}, "none"),
        ({"type": "basis", "dim": 4}, "none"),
    ],
)
def test_the_default_follows_the_weights(weights, expected):
    raw = {"model": {"type": "neuralode", "weights": weights}}
    config = decode(TrainConfig, raw).settled()
    assert config.optimizer.generated_scale == encode(config)["optimizer"]["generated_scale"] == expected
    assert decode(TrainConfig, encode(config)) == config
    for choice in ("sum_e", "none"):
        given = decode(TrainConfig, raw | {"optimizer": {"generated_scale": choice}})
        assert given.settled() == given
        assert decode(TrainConfig, raw).settled(given).optimizer.generated_scale == choice  # continued
    older = decode(TrainConfig, raw)  # stored before there was this key
    assert decode(TrainConfig, raw).settled(older).optimizer.generated_scale == "none"


def test_a_scale_without_projections_is_no_silent_wish():
    for model in ({"type": "gpt2"}, {"type": "neuralode", "weights": {"type": "constant"}}):
        raw = {"model": model, "optimizer": {"generated_scale": "sum_e"}}
        with pytest.warns(Notice, match="no effect"):
            check_config(decode(TrainConfig, raw))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_config(decode(TrainConfig, raw | {"model": {"type": "neuralode"}}))
        check_config(decode(TrainConfig, raw | {"optimizer": {"generated_scale": "none"}}))


def test_a_fine_tune_takes_the_default_of_its_base():
    config = decode(FinetuneConfig, {})
    assert config.optimizer.generated_scale is None
    model = decode(TrainConfig, {"model": {"type": "neuralode"}}).model
    assert dataclasses.replace(config, model=model).settled().optimizer.generated_scale == "sum_e"


def test_the_default_is_not_dropped_silently():
    raw = {"model": {"type": "neuralode"}, "optimizer": {"skip_bad_steps": True}}
    with pytest.raises(UserError, match="generated_scale: none"):
        decode(TrainConfig, raw).settled()
    raw["optimizer"]["generated_scale"] = "none"
    assert decode(TrainConfig, raw).settled().optimizer.skip_bad_steps
