"""Models go out: transformers computes the same logits and writes the same greedy texts, for every kind there is."""

import json

import equinox as eqx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not here: make test-hub")

import torch
import transformers
from levanter.layers.rotary import (
    DefaultRotaryEmbeddingsConfig,
    Llama3RotaryEmbeddingsConfig,
    YarnRotaryEmbeddingsConfig,
)
from support.earlier import OLD
from support.hub import assert_same_logits, assert_same_texts
from support.models import build, heavy, llama, small_config

from qkvflow import convert
from qkvflow.blocks import Gpt2BlockConfig, SsmBlockConfig
from qkvflow.cli import parse
from qkvflow.data import resolve_tokenizer
from qkvflow.depth import DepthConfig, StepRange
from qkvflow.hub.write import write_folder
from qkvflow.models import ControlConfig
from qkvflow.models.levanter_twin import enter
from qkvflow.runs import load_run

LAYERS = DepthConfig(steps=3, step_size="residual")
PLAIN = Gpt2BlockConfig(num_heads=2, form="sequential", mlp_scale=2, use_bias=False)
LLAMA3 = Llama3RotaryEmbeddingsConfig(theta=500.0, original_max_position_embeddings=8)
YARN = YarnRotaryEmbeddingsConfig(factor=4.0, original_max_position_embeddings=8)
NATIVE = {
    "gpt2": small_config("per_layer", "sequential", LAYERS),
    "gpt2 without biases, layers around": small_config(
        "generated", depth=LAYERS, prelude_layers=1, coda_layers=1, block=PLAIN
    ),
    "a flow of one step": small_config("generated", "sequential", DepthConfig(steps=1)),
    "split, layers around": small_config("basis", "split", prelude_layers=1, coda_layers=1),
    "split without biases": small_config(
        block=Gpt2BlockConfig(num_heads=2, form="split", mlp_scale=2, use_bias=False),
        depth=DepthConfig(endpoint="left"),
    ),
    "llama split": small_config("basis", block=llama("split"), depth=DepthConfig(steps=StepRange(2, 4))),
    "llama": small_config("generated", block=llama("sequential"), depth=LAYERS),
    "llama tied": small_config(
        "per_layer", block=llama("sequential", tie_word_embeddings=True, rope=LLAMA3), depth=LAYERS
    ),
    "llama linear": small_config(
        "per_layer", block=llama("sequential", rope=DefaultRotaryEmbeddingsConfig(factor=2.0)), depth=LAYERS
    ),
}
CUSTOM = {
    "parallel": small_config(),
    "sequential, short steps": small_config("generated", "sequential"),
    "rk4": small_config("constant", depth=DepthConfig(steps=2, solver="rk4")),
    "reversible": small_config(depth=DepthConfig(steps=2, solver="heun", adjoint="reversible"), coda_layers=1),
    "split by heun": small_config("basis", "split", DepthConfig(steps=2, solver="heun")),
    "split reversible": small_config("basis", "split", DepthConfig(steps=3, adjoint="reversible")),
    "split ssm": small_config(
        "modulated", block=SsmBlockConfig(num_heads=2, state_size=3, form="split"), coda_layers=1
    ),
    "split control": small_config("constant", "split", control=ControlConfig(dim=3)),
    "llama split yarn": small_config("basis", block=llama("split", rope=YARN)),
    "sequential flow, parallel layers around": small_config(
        "basis", "split", prelude_layers=1, coda_layers=1, ordinary_form="parallel"
    ),
    "llama parallel": small_config(block=llama("parallel", use_bias=True, rope=LLAMA3)),
    "llama official": small_config(block=llama("official"), prelude_layers=1),
    "llama yarn": small_config(block=llama("sequential", rope=YARN)),
    "ssm": small_config("modulated", block=SsmBlockConfig(num_heads=2, state_size=3)),
    "ssm selective": small_config(
        "modulated", block=SsmBlockConfig(num_heads=2, state_size=3, selective=True, form="sequential"), coda_layers=1
    ),
    "control": small_config("constant", control=ControlConfig(dim=3), prelude_layers=1),
}
FAST = (
    "gpt2 without biases, layers around",
    "split, layers around",
    "llama split",
    "llama",
    "split ssm",
    "reversible",
    "llama official",
    "ssm selective",
    "control",
)
WRITING = ("ssm selective", "split, layers around", "llama split")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return resolve_tokenizer("byte", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Where transformers copies the code of folders to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def exported(config, tokenizer, folder):
    model = build(config)
    folder.mkdir()
    return model, write_folder(discretise(model), tokenizer, folder)


discretise = eqx.filter_jit(lambda model, steps=None: model.discretise(steps))


def cases(kinds):
    return [kind if kind in FAST else heavy(kind) for kind in kinds]


@pytest.mark.parametrize("kind", cases(NATIVE))
def test_native(tmp_path, tokenizer, kind):
    """No code in the folder, and none is trusted."""
    model, reason = exported(NATIVE[kind], tokenizer, tmp_path / "out")
    assert reason is None
    assert not list((tmp_path / "out").glob("*.py"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False).eval()
    assert type(theirs) in (transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM)
    assert_same_logits(model, theirs)


@pytest.mark.parametrize("kind", cases(CUSTOM))
def test_with_code(tmp_path, tokenizer, kind):
    model, reason = exported(CUSTOM[kind], tokenizer, tmp_path / "out")
    assert reason is not None
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()), info
    assert_same_logits(model, theirs.eval(), control_of(kind))


def control_of(kind):
    return np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32) if "control" in kind else None


@pytest.mark.parametrize("kind", [kind if kind in WRITING else heavy(kind) for kind in (*NATIVE, *CUSTOM)])
def test_it_writes_the_same(tmp_path, tokenizer, kind):
    """With a cache and without, prompts of different lengths together."""
    model, reason = exported((NATIVE | CUSTOM)[kind], tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=reason is not None)
    assert_same_texts(model, theirs.eval(), control_of(kind))


def test_the_code_needs_nothing_of_ours(tmp_path, tokenizer):
    exported(CUSTOM["parallel"], tokenizer, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").glob("*.py")] == ["modeling_qkvflow.py"]
    lines = (tmp_path / "out" / "modeling_qkvflow.py").read_text().splitlines()
    assert {line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))} == {
        "torch",
        "transformers",
    }


@pytest.mark.parametrize(
    "kind", ["parallel", "gpt2 without biases, layers around", "split, layers around", "llama split"]
)
def test_another_depth(tmp_path, tokenizer, kind):
    """A flow of 3 steps leaves as one of 5: with code, and as 5 layers where its steps have length 1 or are split."""
    model = build((NATIVE | CUSTOM)[kind])
    reason = write_folder(discretise(model, 5), tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=reason is not None).eval()
    assert (reason is None) == (kind in NATIVE)
    assert_same_logits(model.with_depth(model.config.depth.on_grid(5)), theirs)
    assert theirs.config.num_hidden_layers == 5 + model.config.prelude_layers + model.config.coda_layers


def test_beams_and_several_texts_of_a_prompt(tmp_path, tokenizer):
    """States of a mixer move with the texts that they are of: cached beams are those without a cache."""
    exported(CUSTOM["ssm selective"], tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("a", return_tensors="pt").input_ids % 64
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False, "pad_token_id": 0}
    texts = [
        theirs.generate(tokens, use_cache=cached, eos_token_id=None, **options).tolist() for cached in (True, False)
    ]
    assert texts[0] == texts[1]


def test_a_control_for_each_position_goes_on_in_generation(tmp_path, tokenizer):
    """The tokens after the prompt have none; cached texts are those without a cache."""
    exported(CUSTOM["control"], tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokens = torch.arange(1, 9).reshape(2, 4)  # without the padding, 0
    control = torch.randn(2, 4, theirs.config.control, generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "control": control}
    texts = [theirs.generate(tokens, use_cache=cached, **options) for cached in (True, False)]
    assert texts[0].tolist() == texts[1].tolist()
    padded = torch.nn.functional.pad(control, (0, 0, 0, 4))
    logits = theirs(texts[0][:, :8], control=padded).logits[:, 3:]
    assert logits.argmax(-1).tolist() == texts[0][:, 4:].tolist()


def test_a_trainer_may_accumulate_gradients(tmp_path, tokenizer):
    """It tells how many tokens all parts have, and adds the losses of the parts."""
    exported(CUSTOM["parallel"], tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokens = torch.arange(24).reshape(4, 6)
    whole = theirs(tokens, labels=tokens).loss
    parts = [theirs(part, labels=part, num_items_in_batch=20).loss for part in (tokens[:3], tokens[3:])]
    torch.testing.assert_close(sum(parts), whole)


def test_the_tokenizer_leaves(tmp_path, tokenizer):
    exported(NATIVE["gpt2"], tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "naïve 漢字 🙂\n"
    assert set(theirs(text)) == {"input_ids", "attention_mask"}  # all of it goes to a model
    assert theirs(text).input_ids == list(text.encode())
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == 256
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == 256


@pytest.mark.parametrize(
    ("kind", "own"), [("gpt2", {}), ("llama", {}), ("split ssm", {}), ("gpt2", {"tokenizer_class": "OfTheFuture"})]
)
def test_a_tokenizer_without_a_class_leaves_with_its_own_tokens(tmp_path, tokenizer, kind, own):
    """By the type of the model, transformers would take Llama's or GPT-2's, with their special tokens, or none."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    kept = {key: config[key] for key in ("eos_token",) if key in config}
    (bare / "tokenizer_config.json").write_text(json.dumps(kept | own))
    model = build(NATIVE[kind] if kind in NATIVE else CUSTOM[kind])
    (tmp_path / "out").mkdir()
    write_folder(discretise(model), bare, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert theirs("ab").input_ids == [97, 98]
    assert len(theirs) == 257
    assert theirs.eos_token_id == 256


def test_other_programs_find_the_keys_that_they_read(tmp_path, tokenizer):
    exported(NATIVE["gpt2"], tokenizer, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["n_ctx"] == settings["n_positions"] == NATIVE["gpt2"].max_seq_len


@pytest.mark.parametrize("name", ["flow", heavy("hybrid"), heavy("lora"), heavy("gpt2")])
def test_trained_runs_leave(tmp_path, name):
    """By the program: transformers computes what the run computes."""
    words = ["--run", str(OLD / name), "--to_hf", str(tmp_path / "out")]
    out = convert.main(parse(convert.ConvertConfig, words)[0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    assert_same_logits(enter(load_run(OLD / name).model), theirs)
