"""Ranges of the fields of Levanter's classes, which Levanter does not check."""

from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.data.text import LmDataConfig
from levanter.layers.rotary import RotaryEmbeddingsConfig
from levanter.models.lm_model import LmConfig
from levanter.optim import EmaModelAveragingConfig, OptimizerConfig
from levanter.store.cache import CacheOptions
from levanter.trainer import TrainerConfig

from qkvflow.ranges import Range, Table

_COUNT = Range(at_least=1)
_NOT_NEGATIVE = Range(at_least=0)
_POSITIVE = Range(above=0)
_SHARE = Range(at_least=0, at_most=1)
_PROPER_SHARE = Range(at_least=0, below=1)
# Any model of Levanter's that has such a field; most of them spell the same thing alike.
_MODEL = {
    **dict.fromkeys(("max_seq_len", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"), _COUNT),
    **dict.fromkeys(("intermediate_dim", "mlp_scale", "flash_attention_block_size"), _COUNT),
    **dict.fromkeys(("embed_pdrop", "resid_pdrop", "attn_pdrop"), _PROPER_SHARE),
    "layer_norm_epsilon": _POSITIVE,
    "initializer_range": _NOT_NEGATIVE,
}

LEVANTER: Table = {
    LmConfig: _MODEL,
    RotaryEmbeddingsConfig: {
        **dict.fromkeys(("theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
        **dict.fromkeys(("beta_fast", "beta_slow"), _POSITIVE),
        "mscale": _NOT_NEGATIVE,
        "original_max_position_embeddings": _COUNT,
    },
    TrainerConfig: {
        # JAX takes the last 32 bits of a seed, so that others would be the same.
        "seed": Range(at_least=0, below=2**32),
        "num_train_steps": _COUNT,
        "steps_per_eval": _COUNT,
        "max_eval_batches": _COUNT,
    },
    # All numbers in `keep`: `every`, and `until`.
    CheckpointerConfig: {"keep": _COUNT, "keep_last_temporary_checkpoints": _COUNT},
    WatchConfig: {"interval": _NOT_NEGATIVE},
    OptimizerConfig: {
        "learning_rate": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE,
        "min_lr_ratio": _SHARE,
        "warmup": _NOT_NEGATIVE,
        "rewarmup": _NOT_NEGATIVE,
        "cooldown": _NOT_NEGATIVE,
        "decay": _NOT_NEGATIVE,
        "max_grad_norm": _NOT_NEGATIVE,
        "beta1": _PROPER_SHARE,
        "beta2": _PROPER_SHARE,
        "epsilon": _POSITIVE,
    },
    CacheOptions: {"batch_size": _COUNT},
    LmDataConfig: {"mixture_block_size": Range(at_least=1, below=2**16)},  # Levanter's own limit
    EmaModelAveragingConfig: {"beta": _PROPER_SHARE},
}
