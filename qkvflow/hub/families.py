"""Which models can be imported: for each `model_type` of a folder, the Levanter configuration.

Checked against transformers' own logits in tests/hub/test_families.py. Settings that Levanter's `from_hf_config`
ignores are handled here or rejected; a sliding window limits the context to its length, within which it has no effect.
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from levanter.layers.rotary import RotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig
from levanter.models.gemma import GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from qkvflow.errors import Notice, UserError
from qkvflow.inside.rotary import check_rope

_OPTIONAL = ("num_key_value_heads", "intermediate_size", "n_inner", "head_dim", "sliding_window")
_SIZES = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "max_position_embeddings",
    *_OPTIONAL,
)
_RATES = dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), (1e-30, 1.0))
_RATES |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), (0.0, 1.0))
_RATES |= {"initializer_range": (0.0, math.inf)}
_OF_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_OF_SCALING += ("original_max_position_embeddings", "attention_factor")
# Other names of functions that Levanter has.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def model_config(settings: Any, where: str) -> LmConfig:
    """The configuration of Levanter's model for a folder's transformers configuration.

    Args:
        settings: a `PretrainedConfig` of transformers.
        where: the folder, for messages.

    Raises:
        UserError: an unsupported kind of model or setting, with its name.
    """
    settings = copy.deepcopy(settings)  # what is missing is filled in below
    kind = settings.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"{where} contains a model of type {kind!r}, which is not supported. Supported types:"
            f" {', '.join(FAMILIES)}."
        )
    for name in ("hidden_act", "activation_function"):
        if getattr(settings, name, None) in _ACTIVATIONS:
            setattr(settings, name, _ACTIVATIONS[getattr(settings, name)])
    try:
        _check_numbers(settings)
        _settle_rope(settings)
        return FAMILIES[kind](settings)
    except UserError as error:
        raise UserError(f"{where} contains a {kind} that is not supported: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{where}/config.json describes a {kind} that is not supported: {error}") from None


def _gpt2(settings: Any) -> LmConfig:
    _require(settings, scale_attn_weights=True, add_cross_attention=False, tie_word_embeddings=True)
    if settings.n_embd % settings.n_head:
        raise UserError(f"n_embd ({settings.n_embd}) is not a multiple of n_head ({settings.n_head})")
    inner = settings.n_inner or 4 * settings.n_embd
    if inner % settings.n_embd:
        raise UserError(f"n_inner ({inner}) is not a multiple of n_embd ({settings.n_embd})")
    config = Gpt2Config.from_hf_config(settings)
    return dataclasses.replace(config, mlp_scale=inner // settings.n_embd, resid_pdrop=settings.resid_pdrop)


def _llama(settings: Any) -> LmConfig:
    _require(settings, attention_bias=False, mlp_bias=False)
    config = LlamaConfig.from_hf_config(settings)
    config = dataclasses.replace(config, head_dim=_head_dim(settings))
    return _shortened(config, getattr(settings, "sliding_window", None))


def _qwen2(settings: Any) -> LmConfig:
    config = QwenConfig.from_hf_config(settings)
    window = settings.sliding_window if settings.use_sliding_window else None
    return _shortened(dataclasses.replace(config, use_sliding_window=False, sliding_window=None), window)


def _qwen3(settings: Any) -> LmConfig:
    _require(settings, attention_bias=False)
    window = settings.sliding_window if settings.use_sliding_window else None
    config = Qwen3Config.from_hf_config(settings)
    # Levanter's field takes no null, which transformers writes; nothing reads it without `use_sliding_window`.
    config = dataclasses.replace(config, use_sliding_window=False, sliding_window=Qwen3Config.sliding_window)
    return _shortened(config, window)


def _gemma(settings: Any) -> LmConfig:
    _require(settings, attention_bias=False)
    # Levanter does not read it, and has the tanh form, which Gemma's older files call `gelu`.
    if settings.hidden_act not in ("gelu", "gelu_new"):
        raise UserError(f"hidden_act is {settings.hidden_act!r}, but only 'gelu_pytorch_tanh' is supported")
    if settings.hidden_act == "gelu":
        text = "hidden_act 'gelu' is read as 'gelu_pytorch_tanh', which Gemma is trained with; transformers 4.57 reads"
        warnings.warn(Notice(f"{text} the exact function"), stacklevel=2)
    if _head_dim(settings) is not None:
        share = settings.hidden_size // settings.num_attention_heads
        raise UserError(
            f"head_dim is {settings.head_dim}, but only hidden_size / num_attention_heads ({share}) is supported"
        )
    return GemmaConfig.from_hf_config(settings)


def _olmo2(settings: Any) -> LmConfig:
    _require(settings, attention_bias=False)
    return Olmo2Config.from_hf_config(settings)


FAMILIES: dict[str, Callable[[Any], LmConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,  # the same layers
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "olmo2": _olmo2,
}


def _require(settings: Any, **values: Any) -> None:
    for name, value in values.items():
        found = getattr(settings, name, value)
        if found != value:
            raise UserError(f"{name} is {found!r}, but only {value!r} is supported")


def _settle_rope(settings: Any) -> None:
    """Fills in what transformers does where rotary positions are scaled, and refuses what Levanter does not have."""
    _take_rope_parameters(settings)
    _require(settings, partial_rotary_factor=1.0)
    scaling = getattr(settings, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    without_effect = {
        "yarn": {"attention_factor": None, "mscale_all_dim": None, "mscale": 1.0, "truncate": True},
        "default": {"factor": 1.0},
    }
    for name, value in without_effect.get(kind, {}).items():
        if scaling.get(name, value) not in (value, None):
            raise UserError(f"rope_scaling of type {kind!r} has {name}: {scaling[name]!r}, which is not supported")
    if kind == "yarn":
        trained = scaling.get("original_max_position_embeddings") or settings.max_position_embeddings
        settings.rope_scaling = scaling | {"original_max_position_embeddings": trained}
    if not scaling:
        return
    rope = RotaryEmbeddingsConfig.from_hf_config(settings.rope_theta, settings.rope_scaling)
    check_rope(rope)
    if isinstance(rope, YarnRotaryEmbeddingsConfig):
        _check_ramp(settings, rope)


def _check_ramp(settings: Any, rope: YarnRotaryEmbeddingsConfig) -> None:
    """Refuses YaRN whose ramp ends beyond the last pair of a head, where Levanter cuts it off and transformers does
    not."""
    head = _head_dim(settings) or settings.hidden_size // settings.num_attention_heads
    trained = rope.original_max_position_embeddings
    end = head * math.log(trained / (rope.beta_slow * 2 * math.pi)) / (2 * math.log(rope.theta))
    if math.ceil(end) > head // 2 - 1:
        raise UserError(
            f"rope_scaling of type 'yarn' has a ramp that ends at pair {math.ceil(end)} of a head of {head // 2} pairs"
            f" (original_max_position_embeddings {trained}, rope_theta {rope.theta:g}), which is not supported"
        )


def _take_rope_parameters(settings: Any) -> None:
    """`rope_parameters`, one entry for all layers in files of transformers 5, as the two that Levanter reads."""
    given = getattr(settings, "rope_parameters", None)
    if not given:
        return
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise UserError(f"rope_parameters is {given!r}, but only one entry for all layers is supported")
    if getattr(settings, "rope_scaling", None) not in (None, given):
        raise UserError("rope_parameters and rope_scaling are both given and differ: remove the one that is not true")
    scaling = {name: value for name, value in given.items() if name != "rope_theta"}
    theta = given.get("rope_theta", getattr(settings, "rope_theta", None))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < float("inf"):
        raise UserError(f"rope_parameters has rope_theta {theta!r}, but it must be a positive number")
    if "partial_rotary_factor" in scaling:
        settings.partial_rotary_factor = scaling.pop("partial_rotary_factor")
    settings.rope_theta = theta
    settings.rope_scaling = None if scaling.get("rope_type", "default") == "default" else scaling


def _check_numbers(settings: Any) -> None:
    """Rejects invalid sizes and rates. Uses Llama's names, which GPT-2's settings also accept."""
    for name in _SIZES:
        value = getattr(settings, name, None)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r}, but must be a whole number of at least 1")
    scaling = getattr(settings, "rope_scaling", None)
    numbers = {f"rope_scaling: {key}": value for key, value in scaling.items()} if isinstance(scaling, dict) else {}
    numbers = {key: value for key, value in numbers.items() if key.split()[1] in _OF_SCALING and value is not None}
    numbers |= {"rope_theta": settings.rope_theta} if hasattr(settings, "rope_theta") else {}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"{name} is {value!r}, but must be a positive number")
    for name, (low, high) in _RATES.items():
        value = getattr(settings, name, low)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            raise UserError(f"{name} is {value!r}, but must be a number from {low:g} to below {high:g}")


def _head_dim(settings: Any) -> int | None:
    """The head size, if it is not an equal share of the state's width."""
    given = getattr(settings, "head_dim", None)
    return None if given in (None, settings.hidden_size // settings.num_attention_heads) else given


def _shortened(config: Any, window: int | None) -> LmConfig:
    if window is None or window >= config.max_seq_len:
        return config
    return dataclasses.replace(config, max_seq_len=window)
