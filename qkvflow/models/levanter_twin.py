"""The entry point for Levanter's models: converts GPT-2 and Llama to our form, with the same arrays.

`per_layer` weights, sequential blocks, Euler steps of length 1: the same function (tests/models/test_levanter_parity.py
and tests/models/test_levanter_llama.py train both side by side). All other code only handles our form.
"""

import equinox as eqx
import jax
from haliax import NamedArray
from levanter.adaptor.lora import LoraLinear, merge_lora_modules
from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.utils.activation import ActivationFunctionEnum

from qkvflow.axes import HEADS, KV_HEAD, LAYERS, Q_HEADS_PER_GROUP
from qkvflow.blocks import BlockConfig, Gpt2BlockConfig, LlamaBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.weights import PerLayerConfig


def enter(model: LmHeadModel) -> NeuralOdeLMHeadModel:
    """The model in our form, LoRA merged into its weights; may consist of shapes.

    Raises:
        UserError: for a Levanter model that has no such form.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return eqx.filter_eval_shape(_enter, model)
    return _enter(model)


def _enter(model: LmHeadModel) -> NeuralOdeLMHeadModel:
    model = merged(model)
    ours = model if isinstance(model, NeuralOdeLMHeadModel) else twin(model)
    if ours is None:
        raise _unknown(model.config)
    return ours


def enter_config(config: LmConfig) -> NeuralOdeConfig:
    """The configuration of a model in our form.

    Raises:
        UserError: for a Levanter model that has no such form.
    """
    ours = config if isinstance(config, NeuralOdeConfig) else twin_config(config)
    if ours is None:
        raise _unknown(config)
    return ours


def twin(model: LmHeadModel) -> NeuralOdeLMHeadModel | None:
    """The same model of ours, or None if `model` is no plain GPT-2 or Llama of Levanter's."""
    arrays = {Gpt2LMHeadModel: _gpt2_arrays, LlamaLMHeadModel: _llama_arrays}.get(type(model))
    config = twin_config(model.config)
    if arrays is None or config is None:
        return None
    shape = eqx.filter_eval_shape(config.build, model.Vocab, key=jax.random.PRNGKey(0))
    given, own = arrays(model, False), arrays(shape, True)
    if len(given) != len(own) or sum(a.size for a in given) != _parameters(model):
        return None  # it has arrays that ours does not have
    return eqx.tree_at(lambda m: arrays(m, True), shape, [_aligned(a, b) for a, b in zip(given, own, strict=True)])


def twin_config(config: LmConfig) -> NeuralOdeConfig | None:
    """The same model's configuration of ours, or None if it is no plain GPT-2 or Llama of Levanter's."""
    of = {Gpt2Config: _gpt2, LlamaConfig: _llama}.get(type(config))
    block = None if of is None else of(config)
    if block is None:
        return None
    adjoint = "direct" if config.gradient_checkpointing is False else "checkpoint"
    return NeuralOdeConfig(
        max_seq_len=config.max_seq_len,
        hidden_dim=config.hidden_dim,
        block=block,
        weights=PerLayerConfig(),
        depth=DepthConfig(steps=config.num_layers, step_size="residual", adjoint=adjoint),
    )


def merged(model):
    """The same with LoRA merged into the weights, if there is any: Levanter's function copies all arrays."""
    leaves = jax.tree.leaves(model, is_leaf=lambda m: isinstance(m, LoraLinear))
    return merge_lora_modules(model) if any(isinstance(m, LoraLinear) for m in leaves) else model


def _unknown(config: LmConfig) -> UserError:
    kind = config.get_choice_name(type(config))
    return UserError(
        f"the model is of type {kind}, in a variant that qkvflow cannot treat as steps in depth: it supports its own"
        " models (neuralode), and Levanter's gpt2 and llama without extensions (layer-wise attention scaling, upcast"
        " attention, hybrid, query-key or input norms, other head sizes). You can train, evaluate and sample such a"
        " model."
    )


def _gpt2(config: Gpt2Config) -> BlockConfig | None:
    if config.activation_function is ActivationFunctionEnum.xielu:
        return None
    if config.scale_attn_by_inverse_layer_idx or config.upcast_attn:
        return None
    return Gpt2BlockConfig(
        num_heads=config.num_heads,
        form="sequential",
        mlp_scale=config.mlp_scale,
        activation=config.activation_function,
        use_bias=config.use_bias,
        layer_norm_epsilon=config.layer_norm_epsilon,
        embed_pdrop=config.embed_pdrop,
        resid_pdrop=config.resid_pdrop,  # attn_pdrop: Levanter does not apply it
    )


def _llama(config: LlamaConfig) -> BlockConfig | None:
    if config.activation_function is ActivationFunctionEnum.xielu:
        return None
    if config.hybrid_norm or config.use_qk_norm or config.input_embedding_norm:
        return None
    if not config.scan_layers or config.upcast_attn or config.actual_head_size * config.num_heads != config.hidden_dim:
        return None
    return LlamaBlockConfig(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_dim=config.intermediate_dim,
        form="sequential",
        rope=config.rope,
        tie_word_embeddings=config.tie_word_embeddings,
        activation=config.activation_function,
        use_bias=config.use_bias,
        layer_norm_epsilon=config.layer_norm_epsilon,
    )


def _gpt2_arrays(model, is_ours: bool) -> list[NamedArray]:
    block = model.transformer.blocks.stacked
    norms = (block.attn_ln, block.mlp_ln) if is_ours else (block.ln_1, block.ln_2)
    final = model.transformer.norm if is_ours else model.transformer.ln_f
    embeddings = (model.embeddings.token_embeddings, model.embeddings.position_embeddings)
    return _arrays(*norms, final, block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj, *embeddings)


def _llama_arrays(model, is_ours: bool) -> list[NamedArray]:
    block = model.transformer.blocks.stacked if is_ours else model.transformer.layers.stacked
    attention = [getattr(block.self_attn, f"{name}_proj") for name in "qkvo"]
    mlp = (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
    norms = (block.input_layernorm, block.post_attention_layernorm, model.transformer.norm)
    head = () if model.lm_head is None else (model.lm_head,)
    return _arrays(*attention, *mlp, *norms, model.embeddings.token_embeddings, *head)


def _arrays(*modules) -> list[NamedArray]:
    arrays = [a for m in modules for a in (m.weight, getattr(m, "bias", None))]
    return [a for a in arrays if a is not None]


def _aligned(theirs: NamedArray, ours: NamedArray) -> NamedArray:
    """With our names and our order of axes: Levanter's q_proj divides the heads into groups."""
    names = {a.name for a in theirs.axes}
    if Q_HEADS_PER_GROUP in names:
        theirs = theirs.flatten_axes((KV_HEAD, Q_HEADS_PER_GROUP), HEADS)
    if "layer" in names:
        theirs = theirs.rename({"layer": LAYERS})
    return theirs.rearrange(ours.axes)


def _parameters(model) -> int:
    return sum(a.size for a in jax.tree.leaves(model) if eqx.is_array(a) or isinstance(a, jax.ShapeDtypeStruct))
