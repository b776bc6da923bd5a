"""Models exported as native transformers classes: GPT-2 and Llama, on the grid of an Euler flow.

    a layer:                     x' = x + a + mlp(ln2(x + a)),            a = attn(ln1(x))
    an Euler step, split:        x' = x + h a + h mlp(ln2(x + h a))
    an Euler step, sequential:   x' = x + h a + h mlp(ln2(x + a))

A split step is a layer whose output projections and their biases, of attention and of the MLP, are multiplied by h (in
fp32): h a takes the place of a everywhere. A sequential step is a layer for h = 1 only (`step_size: residual`, a single
step, the ordinary layers around a flow): else no projection can both add h a to x and show x + a to the MLP.
"""

from typing import Any

import numpy as np
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig

from qkvflow.blocks import Gpt2BlockConfig, LlamaBlockConfig
from qkvflow.depth import FixedPlan
from qkvflow.models import NeuralOdeConfig

Arrays = dict[str, np.ndarray]
_GPT2 = {"attn_ln": "ln_1", "mlp_ln": "ln_2"}
_OUTPUTS = ("attn.c_proj.", "mlp.c_proj.", "self_attn.o_proj.", "mlp.down_proj.")  # what is added to the state


def obstacle(config: NeuralOdeConfig) -> str | None:
    """Why a discretised model is not a native one; None if it is."""
    block, plan = config.block, config.plan
    if not isinstance(block, Gpt2BlockConfig | LlamaBlockConfig):
        return "its block is neither GPT-2 nor Llama"
    if config.control is not None:
        return "it has a control signal"
    if isinstance(block, Gpt2BlockConfig) and block.convolution is not None:
        return "its block has a convolution"
    if block.form not in ("sequential", "split"):
        return f"its block has the {block.form} form"
    if config.ordinary_form != "sequential":
        return f"the layers around its flow have the {config.ordinary_form} form"
    assert isinstance(plan, FixedPlan)
    if plan.grid.tableau.stages > 1 or plan.grid.coupling is not None:
        return f"its solver ({config.depth.solver}) has several evaluations in a step"
    if plan.step != 1.0 and block.form == "sequential":
        return f"its steps have length 1/{plan.steps}, but a layer of the sequential form is a step of length 1"
    if isinstance(block, LlamaBlockConfig):
        if block.use_bias:
            return "its norms have biases"
        if not isinstance(block.rope, DefaultRotaryEmbeddingsConfig | Llama3RotaryEmbeddingsConfig):
            return "its rotary positions are of a different type"
    return None


def native(config: NeuralOdeConfig, arrays: Arrays, vocab_size: int) -> tuple[dict[str, Any], Arrays]:
    """`config.json` and the arrays of the native class.

    Args:
        config: of a discretised model without `obstacle`.
        arrays: its arrays with qkvflow's names, matrices [in, out].
    """
    of = _llama if isinstance(config.block, LlamaBlockConfig) else _gpt2
    return of(config, arrays, vocab_size)


def _gpt2(config: NeuralOdeConfig, arrays: Arrays, vocab_size: int) -> tuple[dict[str, Any], Arrays]:
    block = config.block
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": config.max_seq_len,
        "n_ctx": config.max_seq_len,  # transformers has no such key any more, but llama.cpp's converter reads it
        "n_embd": config.hidden_dim,
        "n_layer": _layers(config),
        "n_head": block.num_heads,
        "n_inner": block.mlp_scale * config.hidden_dim,
        "activation_function": block.activation.value,
        "layer_norm_epsilon": block.layer_norm_epsilon,
        "attn_pdrop": block.attn_pdrop,
        "embd_pdrop": block.embed_pdrop,
        "resid_pdrop": block.resid_pdrop,
        "tie_word_embeddings": True,
    }
    found = {
        "transformer.wte.weight": arrays["embeddings.token_embeddings.weight"],
        "transformer.wpe.weight": arrays["embeddings.position_embeddings.weight"],
    }
    inner = {f"transformer.ln_f.{rest}": array for rest, array in _of_norm(arrays).items()}
    for (number, rest), array in _of_layers(config, arrays).items():
        first, _, others = rest.partition(".")
        inner[f"transformer.h.{number}.{_GPT2.get(first, first)}.{others}"] = array
    if not block.use_bias:  # the native classes always have biases
        zeros = {name: np.zeros(array.shape[-1], array.dtype) for name, array in inner.items()}
        inner |= {f"{name.removesuffix('weight')}bias": zero for name, zero in zeros.items()}
    return settings, found | inner


def _llama(config: NeuralOdeConfig, arrays: Arrays, vocab_size: int) -> tuple[dict[str, Any], Arrays]:
    block = config.block
    theta, scaling = block.rope.to_hf_config()
    if scaling is not None:
        scaling = {"rope_type": "linear", **scaling}
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_dim,
        "intermediate_size": block.mlp_dim(config.hidden_dim),
        "num_hidden_layers": _layers(config),
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": config.hidden_dim // block.num_heads,
        "hidden_act": block.activation.value,
        "rms_norm_eps": block.norm(config.Embed).eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": block.attn_pdrop,
        "tie_word_embeddings": block.tie_word_embeddings,
    }
    found = {"model.embed_tokens.weight": arrays["embeddings.token_embeddings.weight"]}
    found |= {f"model.norm.{rest}": array for rest, array in _of_norm(arrays).items()}
    found |= {f"model.layers.{number}.{rest}": array.T for (number, rest), array in _of_layers(config, arrays).items()}
    if not block.tie_word_embeddings:
        found["lm_head.weight"] = arrays["lm_head.weight"].T
    return settings, found


def _layers(config: NeuralOdeConfig) -> int:
    return config.prelude_layers + config.depth.reading_steps + config.coda_layers


def _of_layers(config: NeuralOdeConfig, arrays: Arrays) -> dict[tuple[int, str], np.ndarray]:
    """(layer index, rest of the name) -> array, for prelude, flow and coda; output projections of the flow times h."""
    assert isinstance(config.plan, FixedPlan)
    step = np.float32(config.plan.step)
    first = {"prelude": 0, "flow": config.prelude_layers, "coda": config.prelude_layers + config.depth.reading_steps}
    found = {}
    for part, start in first.items():
        prefix = f"transformer.{part}.blocks."
        for name, array in arrays.items():
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                is_scaled = part == "flow" and rest.startswith(_OUTPUTS)
                found[start + int(number), rest] = array * step if is_scaled else array
    return found


def _of_norm(arrays: Arrays) -> Arrays:
    prefix = "transformer.norm."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
