"""Parity with the official implementation on its own arrays: logits, loss, every gradient, trajectory, depth change.

Tolerances are relative to the largest entry: 2e-5 for the plain arrays (rounding of fp32 in another order of operations
gives 1e-6 to 6e-6), 3e-4 for `strong`, whose reference moves by 6e-5 between its own jit and eager runs.
"""

import dataclasses
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.lm_model import LmExample

from qkvflow import official
from qkvflow.blocks import SsmBlockConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig

TOLERANCE = {"gpt2": 2e-5, "gpt2_strong": 3e-4, "llama": 2e-5, "llama_strong": 3e-4}


class Case:
    def __init__(self, name):
        self.arrays = dict(np.load(f"tests/golden/{name}.npz"))
        self.grads = dict(np.load(f"tests/golden/{name}_gradients.npz"))
        self.params = {k.removeprefix("param/"): v for k, v in self.arrays.items() if k.startswith("param/")}
        self.is_llama = name.startswith("llama")
        self.load = official.load_llama if self.is_llama else official.load_gpt2
        self.model = self.load(self.params, num_heads=4, steps=6)
        self.tokens = hax.named(jnp.asarray(self.arrays["in/tokens"]), ("batch", "position"))
        self.tolerance = TOLERANCE[name]

    def close(self, ours, name):
        reference = self.arrays[name] if name in self.arrays else self.grads[name]
        error = np.abs(np.asarray(ours) - reference).max() / np.abs(reference).max()
        assert error <= self.tolerance, f"{name}: {error:.2e} > {self.tolerance}"


@pytest.fixture(scope="module", params=list(TOLERANCE))
def case(request):
    return Case(request.param)


def test_logits(case):
    logits = eqx.filter_jit(lambda m: m(case.tokens, AttentionMask.causal()))(case.model)
    case.close(logits.array, "out/logits")


def test_loss_and_every_gradient(case):
    mask = case.arrays["in/loss_mask"]

    def loss(model):
        log_p = jax.nn.log_softmax(model(case.tokens).array)
        targets = jnp.roll(case.tokens.array, -1, axis=1)
        per_token = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(per_token * mask[None]) / (mask.sum() * per_token.shape[0]), per_token

    (value, per_token), grads = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(case.model)
    case.close(value, "out/loss")
    reference = case.arrays["out/loss_per_token"] * mask
    assert np.abs(per_token * mask[None] - reference).max() <= case.tolerance * reference.max()
    by_name = official.to_arrays(grads)
    assert set(by_name) == {k.removeprefix("grad/") for k in case.grads}
    for name, grad in by_name.items():
        case.close(grad, f"grad/{name}")


def test_levanter_loss(case):
    """The loss as training computes it, from the activations and the head."""
    tokens = case.tokens
    example = LmExample(
        tokens=tokens,
        loss_weight=hax.named(jnp.asarray(case.arrays["in/loss_mask"]), "position").broadcast_axis(
            tokens.resolve_axis("batch")
        ),
        attn_mask=AttentionMask.causal(),
    )
    loss = eqx.filter_jit(lambda m: m.compute_next_token_loss(example).scalar())(case.model)
    case.close(loss, "out/loss")


def test_trajectory(case):
    states = eqx.filter_jit(lambda m: m.trajectory(case.tokens))(case.model)
    assert [a.name for a in states.axes] == ["layers", "batch", "position", "embed"]
    case.close(states.array, "out/trajectory")


@pytest.mark.parametrize("steps", [6, 9])
def test_discretised_logits(case, steps):
    discrete = case.model.discretise(steps)
    assert discrete.transformer.blocks.Block.size == steps
    kind = "euler" if case.is_llama else "eval_at"
    case.close(eqx.filter_jit(lambda m: m(case.tokens))(discrete).array, f"out/{kind}_1_{steps}/logits")


def test_to_arrays_is_the_inverse(case):
    back = official.to_arrays(case.model)
    assert set(back) == set(case.params)
    for name, value in case.params.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_wrong_arrays_are_refused(case):
    ending, bent_name = (
        ("up_proj.f_W.bias", "transformer.norm.weight") if case.is_llama else ("c_fc.f_b", "transformer.ln_f.weight")
    )
    missing = {k: v for k, v in case.params.items() if not k.endswith(ending)}
    with pytest.raises(UserError, match=rf"1 missing: .*{re.escape(ending)}"):
        case.load(missing, num_heads=4, steps=6)
    prefixed = {"param/" + k: v for k, v in case.params.items()}
    with pytest.raises(UserError, match="is missing"):
        case.load(prefixed, num_heads=4, steps=6)
    bent = case.params | {bent_name: np.ones(31, np.float32)}
    with pytest.raises(UserError, match=rf"{re.escape(bent_name)} has shape \(31,\)"):
        case.load(bent, num_heads=4, steps=6)
    with pytest.raises(UserError, match="divi"):
        case.load(case.params, num_heads=5, steps=6)


def test_only_generated_weights_have_official_names(case):
    with pytest.raises(UserError, match="before discretise"):
        official.to_arrays(case.model.discretise())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights.frozen_time", 0.5),
        ("weights.time_scale", 3.0),
        ("block.form", "split"),
        ("depth.solver", "heun"),
        ("depth.endpoint", "left"),
        ("depth.step_size", "residual"),
        ("depth.adjoint", "reversible"),
        ("depth.coupling", 0.9),
        ("prelude_layers", 1),
        ("coda_layers", 1),
        ("control", ControlConfig(dim=2)),
        ("embedding_multiplier", 12.0),
    ],
)
def test_a_model_that_cannot_be_loaded_again_has_no_official_arrays(case, key, value):
    """Otherwise they would be those of another function."""
    config = case.model.config
    section, _, name = key.rpartition(".")
    own = dataclasses.replace(getattr(config, section), **{name: value}) if section else value
    config = dataclasses.replace(config, **{section or name: own})
    with pytest.raises(UserError, match=f"The official code has no .*{key}: {re.escape(str(value))}"):
        official.to_arrays(dataclasses.replace(case.model, _config=config))


def test_another_block_has_no_official_arrays():
    model = Case("gpt2").model
    config = dataclasses.replace(model.config, block=SsmBlockConfig(num_heads=4))
    with pytest.raises(UserError, match="The official code has no `block: ssm`"):
        official.to_arrays(dataclasses.replace(model, _config=config))


def test_rotary_tables_may_be_given():
    """They are no parameters; tables of other positions than the block's are refused."""
    case = Case("llama")
    tables = {k.removeprefix("const/"): v for k, v in case.arrays.items() if k.startswith("const/")}
    assert len(tables) == 2
    model = official.load_llama(case.params | tables, num_heads=4, steps=6)
    assert set(official.to_arrays(model)) == set(case.params)
    rope = DefaultRotaryEmbeddingsConfig(theta=500.0)
    with pytest.raises(UserError, match=r"_cached differs by .* rotary positions"):
        official.load_llama(case.params | tables, num_heads=4, steps=6, rope=rope)


def test_grouped_queries_are_read_off_the_arrays():
    case = Case("llama")
    kv = [f"transformer.block.self_attn.{n}_proj.f_W.{p}" for n in "kv" for p in ("weight", "bias")]
    halved = {n: v[..., ::2, :] if n in kv else v for n, v in case.params.items()}
    model = official.load_llama(halved, num_heads=4, steps=6)
    assert model.config.block.num_kv_heads == 2
    # Two query heads share each: the same as full heads with every key and value head twice.
    full = {n: np.repeat(v, 2, axis=-2) if n in kv else v for n, v in halved.items()}
    run = eqx.filter_jit(lambda m: m(case.tokens).array)
    expected = run(official.load_llama(full, num_heads=4, steps=6))
    np.testing.assert_allclose(run(model), expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_official_checkpoint_directory(case, tmp_path):
    """The layout of the official code's Levanter: one zarr folder per array, below model/."""
    import tensorstore as ts

    for name, value in case.params.items():
        path = tmp_path / "model" / name.replace(".", "/")
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
        store = ts.open(spec, create=True, dtype=ts.float32, shape=value.shape).result()
        store.write(value).result()
    arrays = official.read_checkpoint(tmp_path)
    assert set(arrays) == set(case.params)
    for name, value in case.params.items():
        np.testing.assert_array_equal(arrays[name], value)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="contains no arrays"):
        official.read_checkpoint(tmp_path / "nothing")
