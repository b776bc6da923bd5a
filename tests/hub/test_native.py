"""Which models leave as native classes, and that the length of a step is in their projections; without torch."""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax.state_dict import to_torch_compatible_state_dict
from support.configs import ROOT
from support.models import VOCAB, build, llama, random_tokens, small_config

from qkvflow.blocks import Gpt2BlockConfig, SsmBlockConfig
from qkvflow.blocks.gpt2 import Gpt2LikeConfig
from qkvflow.cli import parse
from qkvflow.data import resolve_tokenizer
from qkvflow.depth import DepthConfig, StepRange
from qkvflow.errors import UserError
from qkvflow.hub.custom import custom
from qkvflow.hub.native import native, obstacle
from qkvflow.hub.write import write_folder
from qkvflow.models import ControlConfig
from qkvflow.models.levanter_twin import enter
from qkvflow.runs import TrainConfig, load_run

RESIDUAL = DepthConfig(steps=3, step_size="residual")


@pytest.mark.parametrize(
    ("config", "steps", "reason"),
    [
        (small_config(form="split"), 3, None),
        (small_config(form="split", depth=DepthConfig(steps=StepRange(2, 4))), 9, None),
        (small_config(form="split", depth=RESIDUAL), 2, None),
        (small_config(form="split", depth=DepthConfig(steps=3, adjoint="backsolve", endpoint="left")), 3, None),
        (small_config(block=llama("split")), 4, None),
        (small_config(form="sequential", depth=RESIDUAL), 3, None),
        (small_config(form="sequential"), 1, None),
        (small_config(form="sequential"), 3, "1/3.*sequential form"),
        (small_config(form="parallel", depth=RESIDUAL), 3, "parallel form"),
        (small_config(block=llama("official")), 3, "official form"),
        (small_config(form="split", depth=DepthConfig(solver="heun")), 3, "heun.* several evaluations"),
        (small_config(form="split", depth=DepthConfig(adjoint="reversible")), 3, "several evaluations"),
        (small_config(form="split", control=ControlConfig(dim=2)), 3, "control"),
        (small_config(block=Gpt2BlockConfig(num_heads=2, form="split", convolution=4)), 3, "convolution"),
        (small_config(block=llama("split", use_bias=True)), 3, "biases"),
        (small_config(block=SsmBlockConfig(num_heads=2, form="split")), 3, "neither GPT-2 nor Llama"),
    ],
)
def test_what_stands_in_the_way(config, steps, reason):
    found = obstacle(config.at_depth(steps))
    if reason is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


class OwnBlockConfig(Gpt2LikeConfig):
    """A block that a user adds."""

    init = flops_per_token = None


@pytest.mark.parametrize("block", [Gpt2BlockConfig(num_heads=2, convolution=4), OwnBlockConfig(num_heads=2)])
def test_a_block_that_the_exported_code_lacks_is_refused(block):
    with pytest.raises(UserError, match=r"^a block .* cannot be exported: .* Keep the run"):
        custom(small_config(block=block).at_depth(3), {}, 257)


@pytest.mark.parametrize("form", ["split", "parallel"])
def test_the_continuous_configuration_leaves_natively_if_it_is_split(form):
    path = str(ROOT / "configs" / "continuous.yaml")
    config = parse(TrainConfig, ["--config_path", path, "--model.block.form", form])[0].model
    assert [obstacle(config.at_depth(steps)) is None for steps in (3, 24)] == [form == "split"] * 2


@pytest.mark.parametrize(
    ("block", "last"),
    [
        (Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="split"), ("attn.c_proj.", "mlp.c_proj.")),
        (llama("split"), ("o_proj.", "down_proj.")),
    ],
    ids=["gpt2", "llama"],
)
def test_only_what_the_flow_adds_is_scaled(block, last):
    """The output projections, weights and biases, of its layers; nothing of the layers around it."""
    found = {}
    for name, depth in (("flow", DepthConfig(steps=4)), ("layers", DepthConfig(steps=4, step_size="residual"))):
        model = build(small_config("basis", block=block, depth=depth, prelude_layers=1, coda_layers=1)).discretise()
        arrays = {
            key.replace(".weights.blocks.", ".blocks."): np.asarray(jax.device_get(array), np.float32)
            for key, array in to_torch_compatible_state_dict(model).items()
        }
        found[name] = native(model.config, arrays, VOCAB.size)[1]
    assert found["flow"].keys() == found["layers"].keys()
    scaled = {key for key in found["flow"] if not np.array_equal(found["flow"][key], found["layers"][key])}
    assert scaled == {
        key for key in found["flow"] if any(f".{n}." in key and p in key for n in range(1, 5) for p in last)
    }
    for key in scaled:
        np.testing.assert_array_equal(found["flow"][key], found["layers"][key] * np.float32(0.25))


@pytest.mark.parametrize(
    ("block", "multiplier"),
    [
        (Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="split"), 50.0),
        (llama("split"), 1.0),
        (llama("split", tie_word_embeddings=False), 3.0),
    ],
)
def test_what_left_comes_back_as_an_ordinary_model(tmp_path, block, multiplier):
    """A split flow at another depth: Levanter's GPT-2 or Llama of as many layers, the same function."""
    Vocab = hax.Axis("vocab", 257)  # of the tokenizer
    config = small_config("basis", block=block, coda_layers=1, embedding_multiplier=multiplier)
    model = config.build(Vocab, key=jax.random.PRNGKey(0))
    tokenizer = resolve_tokenizer("byte", tmp_path / "tokenizer")
    (tmp_path / "out").mkdir()
    assert write_folder(model.discretise(5), tokenizer, tmp_path / "out") is None
    back = enter(load_run(tmp_path / "out").model)
    assert (back.config.block.form, back.config.plan.steps, back.config.plan.step) == ("sequential", 6, 1.0)
    logits = eqx.filter_jit(lambda m: m(random_tokens()).rearrange(("batch", "position", "vocab")).array)
    np.testing.assert_allclose(logits(back), logits(model.discretise(5)), atol=1e-5)
