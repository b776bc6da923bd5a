"""Models without a native transformers class: the settings and arrays for `modeling_qkvflow.py`."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from levanter.layers.rotary import (
    DefaultRotaryEmbeddingsConfig,
    Llama3RotaryEmbeddingsConfig,
    RotaryEmbeddingsConfig,
    YarnRotaryEmbeddingsConfig,
)

from qkvflow.blocks import BlockConfig, Gpt2BlockConfig, LlamaBlockConfig, SsmBlockConfig
from qkvflow.blocks.state_space import delta_rank
from qkvflow.depth import FixedPlan
from qkvflow.errors import UserError
from qkvflow.hub.native import Arrays
from qkvflow.models import NeuralOdeConfig
from qkvflow.models.cost import evaluations

MODELING = Path(__file__).with_name("modeling_qkvflow.py")


def custom(config: NeuralOdeConfig, arrays: Arrays, vocab_size: int) -> tuple[dict[str, Any], Arrays]:
    """`config.json` and the arrays.

    Args:
        config: of a discretised model.
        arrays: its arrays with qkvflow's names, matrices [in, out].
    """
    block, tied = config.block, config.block.tie_word_embeddings
    settings = {
        "architectures": ["QkvflowForCausalLM"],
        "model_type": "qkvflow",
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.QkvflowConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.QkvflowForCausalLM",
        },
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_dim,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.kv_heads if isinstance(block, LlamaBlockConfig) else block.num_heads,
        "num_hidden_layers": evaluations(config),
        "prelude_layers": config.prelude_layers,
        "coda_layers": config.coda_layers,
        "block": _block(block, config),
        "flow": _flow(config),
        "control": None if config.control is None else config.control.dim,
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    return settings, arrays | ({} if tied else {"lm_head.weight": arrays["lm_head.weight"].T})


def check_block(block: BlockConfig) -> None:
    """Raises: UserError: neither transformers nor the exported code has such a block."""
    if not isinstance(block, Gpt2BlockConfig | LlamaBlockConfig | SsmBlockConfig):
        raise UserError(
            f"a block of type {type(block).__name__} cannot be exported: the exported code has the blocks of qkvflow"
            " only. Keep the run, which every program of qkvflow reads"
        )
    if isinstance(block, Gpt2BlockConfig) and block.convolution is not None:
        raise UserError(
            f"a block with a convolution (`block.convolution: {block.convolution}`) cannot be exported: neither"
            " transformers nor the exported code has one. Keep the run, which every program of qkvflow reads, or"
            " train without it"
        )


def _block(block: BlockConfig, config: NeuralOdeConfig) -> dict[str, Any]:
    check_block(block)
    around = block.norm(config.Embed)
    common = {
        "form": block.form,
        "ordinary_form": config.ordinary_block.form,
        "field_step": config.plan.field_step,
        "bias": block.use_bias,
        "norm_bias": block.use_bias,
        "norm_eps": around.eps,
        "eps": around.eps,
    }
    if isinstance(block, LlamaBlockConfig):
        inside = block.block_norm(config.Embed)
        frequencies, scale = _rotation(block.rope, config.hidden_dim // block.num_heads)
        return common | {
            "kind": "llama",
            "norm_bias": inside.bias is not None,
            "eps": inside.eps,
            "activation": block.activation.value,
            "inner": block.mlp_dim(config.hidden_dim),
            "frequencies": [float(f) for f in frequencies],
            "rotation_scale": scale,
        }
    if isinstance(block, Gpt2BlockConfig):
        return common | {
            "kind": "gpt2",
            "activation": block.activation.value,
            "inner": block.mlp_scale * config.hidden_dim,
        }
    assert isinstance(block, SsmBlockConfig)
    rank = delta_rank(config.hidden_dim) if block.selective else None
    return common | {"kind": "ssm", "state_size": block.state_size, "delta_rank": rank}


def _flow(config: NeuralOdeConfig) -> dict[str, Any]:
    plan = config.plan
    assert isinstance(plan, FixedPlan)
    grid = plan.grid
    is_reversible = grid.coupling is not None
    return {
        "blocks": len(plan.times),
        "a": [list(row) for row in grid.tableau.a],
        "b": list(grid.tableau.b),
        "rows": [[row[slot] for slot in grid.stage_slots] for row in grid.time_rows],
        "back": [[row[slot] for slot in grid.backward_slots] for row in grid.time_rows] if is_reversible else None,
        "step": plan.step,
        "coupling": grid.coupling,
    }


def _rotation(rope: RotaryEmbeddingsConfig, size: int) -> tuple[np.ndarray, float]:
    """The rotation angle of each pair per position, fp32 [size / 2], and a factor for the result; as in
    `levanter.layers.rotary`."""
    plain = (1.0 / (np.float32(rope.theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size)))).astype(
        np.float32
    )
    if isinstance(rope, DefaultRotaryEmbeddingsConfig):
        return plain / np.float32(rope.factor), 1.0
    if isinstance(rope, Llama3RotaryEmbeddingsConfig):
        length, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
        waves = 2 * np.pi / plain
        smooth = (length / waves - low) / (high - low)
        between = (1 - smooth) * plain / rope.factor + smooth * plain
        long = np.where(waves > length / low, plain / rope.factor, plain)
        is_between = (waves >= length / high) & (waves <= length / low)
        return np.where(is_between, between, long).astype(np.float32), 1.0
    if isinstance(rope, YarnRotaryEmbeddingsConfig):
        length, half = rope.original_max_position_embeddings, size // 2

        def place(turns: float) -> float:
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = max(math.floor(place(rope.beta_fast)), 0), min(math.ceil(place(rope.beta_slow)), half - 1)
        ramp = np.clip((np.arange(half, dtype=np.float32) - low) / max(high - low, 1), 0.0, 1.0)
        scale = 1.0 if rope.factor <= 1.0 else 0.1 * rope.mscale * math.log(rope.factor) + 1.0
        return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32), scale
    raise UserError(
        f"rotary positions of type {type(rope).__name__} cannot be exported: only default, linear, llama3 and yarn can"
    )
