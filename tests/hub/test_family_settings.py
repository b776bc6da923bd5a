"""Settings of models that come in, without their arrays: what a run writes of them, and what is refused."""

import copy

import pytest
import transformers
from levanter.models.lm_model import LmConfig

from qkvflow.config import decode, encode
from qkvflow.errors import Notice, UserError
from qkvflow.hub.families import FAMILIES, model_config

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
KINDS = {
    "gpt2": transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=8),
    "olmo2": transformers.Olmo2Config(**SIZES),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_reads_what_it_wrote_of_the_model(kind):
    config = model_config(KINDS[kind], "folder")
    assert decode(LmConfig, encode(config)) == config


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("llama", {"rope_theta": None}, "rope_theta is None, but must be a positive number"),
        ("llama", {"rope_theta": "10000"}, "rope_theta is '10000'"),
        ("mistral", {"rope_theta": 0}, "rope_theta is 0"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling: factor is '2'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        ("gpt2", {"initializer_range": None}, "initializer_range is None"),
    ],
)
def test_numbers_that_would_fail_in_the_first_pass(kind, changes, told):
    settings = copy.deepcopy(KINDS[kind])
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(UserError, match=told):
        model_config(settings, "folder")


def test_gelu_of_gemma_is_told():
    settings = transformers.GemmaConfig(**SIZES, head_dim=8, hidden_act="gelu")
    with pytest.warns(Notice, match="'gelu' is read as 'gelu_pytorch_tanh'"):
        model_config(settings, "folder")


def test_heads_of_gemma_that_levanter_does_not_have():
    settings = transformers.GemmaConfig(**SIZES, head_dim=16)
    with pytest.raises(UserError, match=r"head_dim is 16, but only hidden_size / num_attention_heads \(8\)"):
        model_config(settings, "folder")
