"""Models of transformers come in: the same logits and the same greedy texts, for every kind that is read."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not here: make test-hub")

import torch
import transformers
from safetensors.numpy import load_file
from support.hub import GPT2, SMALL, assert_same_logits, assert_same_texts, drawn
from support.models import heavy

from qkvflow.data import resolve_tokenizer
from qkvflow.errors import UserError
from qkvflow.hub.families import FAMILIES, model_config
from qkvflow.hub.write import write_folder
from qkvflow.models.levanter_twin import enter
from qkvflow.runs import load_run

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
KINDS = {
    "gpt2": GPT2,
    "llama": transformers.LlamaConfig(**SMALL),
    "llama with llama3 positions": transformers.LlamaConfig(
        **SMALL, rope_theta=500.0, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 8}
    ),
    "llama with linear positions": transformers.LlamaConfig(
        **SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ),
    "llama with yarn positions": transformers.LlamaConfig(**SMALL, rope_scaling=YARN, tie_word_embeddings=True),
    "llama with yarn positions of its own length": transformers.LlamaConfig(
        **SMALL, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    ),
    "llama with wide heads": transformers.LlamaConfig(**SMALL, head_dim=12),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=8),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=8),
    "olmo2": transformers.Olmo2Config(**SMALL),
}
FAST = ("gpt2", "mistral", "qwen3")


def saved(settings, folder, dtype=torch.float32, **options):
    """A drawn model in a folder with a tokenizer."""
    model = drawn(settings).to(dtype)
    model.save_pretrained(folder, **options)
    resolve_tokenizer("byte", folder)
    return model.float()


def test_a_configuration_is_read_twice_as_once():
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    settings = transformers.LlamaConfig(**SMALL)
    settings.rope_parameters = linear
    first, second = model_config(settings, "folder"), model_config(settings, "folder")
    assert first == second
    assert settings.rope_parameters == linear


@pytest.mark.parametrize("kind", [kind if kind in FAST else heavy(kind) for kind in KINDS])
def test_it_comes_in(tmp_path, kind):
    theirs = saved(KINDS[kind], tmp_path)
    run = load_run(tmp_path)
    assert_same_logits(run.model, theirs)
    if kind in ("gpt2", "llama"):
        assert_same_texts(run.model, theirs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_it_goes_out_as_it_came(tmp_path, kind):
    """Every array bit for bit, and transformers loads them without code."""
    theirs = saved(KINDS[kind], tmp_path / "in")
    (tmp_path / "out").mkdir()
    run = load_run(tmp_path / "in")
    assert write_folder(enter(run.model).discretise(), run.directory.tokenizer, tmp_path / "out") is None
    came, went = (load_file(tmp_path / place / "model.safetensors") for place in ("in", "out"))
    assert came.keys() == went.keys()
    for name, array in came.items():
        assert array.dtype == went[name].dtype
        assert array.tobytes() == went[name].tobytes(), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert type(again) is type(theirs)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_positions_as_newer_files_give_them(tmp_path, scaling):
    """transformers 5 writes one entry, `rope_parameters`."""
    given = None if scaling["rope_type"] == "default" else scaling
    theirs = saved(transformers.MistralConfig(**SMALL, rope_theta=500.0, rope_scaling=given), tmp_path)
    set_rope(tmp_path, rope_parameters={**scaling, "rope_theta": 500.0})
    assert_same_logits(load_run(tmp_path).model, theirs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one entry for all layers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta 0, but it must be"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_positions_that_are_not_read_are_named(tmp_path, given, message):
    KINDS["mistral"].save_pretrained(tmp_path)
    set_rope(tmp_path, **given)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path)


def set_rope(folder, **given):
    raw = json.loads((folder / "config.json").read_text())
    plain = {name: value for name, value in raw.items() if name not in ("rope_theta", "rope_scaling")}
    (folder / "config.json").write_text(json.dumps(plain | given))


def test_every_kind_is_tried():
    assert {settings.model_type for settings in KINDS.values()} == set(FAMILIES)


def test_several_files_in_half_precision(tmp_path):
    """fp32 holds bf16 exactly, so nothing is lost."""
    theirs = saved(KINDS["llama"], tmp_path, torch.bfloat16, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_logits(load_run(tmp_path).model, theirs)


def test_a_window_shortens_the_context(tmp_path):
    saved(KINDS["mistral"], tmp_path)
    assert load_run(tmp_path).model.Pos.size == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            transformers.GPTNeoXConfig(vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
            "gpt_neox",
        ),
        (transformers.LlamaConfig(**SMALL, attention_bias=True), "attention_bias is True"),
        (transformers.LlamaConfig(**SMALL, rope_scaling=YARN | {"attention_factor": 1.0}), "attention_factor: 1.0"),
        (
            transformers.LlamaConfig(**SMALL, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
            "mscale_all_dim",
        ),
        (transformers.LlamaConfig(**SMALL, rope_scaling=YARN | {"truncate": False}), "truncate: False"),
        (transformers.LlamaConfig(**SMALL, rope_theta=1.0, rope_scaling=YARN), r"theta \(1\) must be above 1"),
        (
            transformers.LlamaConfig(**SMALL, rope_scaling=YARN | {"beta_fast": 1.0, "beta_slow": 32.0}),
            r"beta_slow \(32\) must be below beta_fast \(1\)",
        ),
        (
            transformers.LlamaConfig(
                **SMALL, head_dim=128, rope_scaling=YARN | {"original_max_position_embeddings": 65_536}
            ),
            "a ramp that ends at pair 65 of a head of 64 pairs",
        ),
        (transformers.GemmaConfig(**SMALL, head_dim=8, hidden_act="silu"), "hidden_act is 'silu'"),
        (
            transformers.GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, scale_attn_weights=False),
            "scale_attn",
        ),
    ],
)
def test_what_is_not_read_is_named(tmp_path, settings, message):
    settings.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path)


def test_code_of_a_folder_is_never_run(tmp_path):
    saved(KINDS["gpt2"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoConfig": "evil.Config"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('this was run')")
    load_run(tmp_path)
