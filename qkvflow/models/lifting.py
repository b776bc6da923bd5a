"""From ordinary layers to a flow: the same model with a W(t) that passes through or near its layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qkvflow.blocks import Gpt2BlockConfig, LlamaBlockConfig
from qkvflow.errors import UserError
from qkvflow.models.alignment import align
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.weights import (
    BasisConfig,
    Fit,
    FunctionBasis,
    PerLayerConfig,
    WeightsConfig,
    check_enough_layers,
    fit,
)


def check_liftable(config: NeuralOdeConfig, weights: WeightsConfig, *, align: bool) -> BasisConfig:
    """`weights`, if they can be fitted to the layers of such a model.

    Raises:
        UserError: the model has no layers that could be fitted, or aligned if that is asked for; `weights` are of
            another kind, or are more functions of time than there are layers.
    """
    if not isinstance(weights, BasisConfig):
        raise UserError(
            f"weights of type {_kind(weights)} cannot be fitted to layers: least squares only finds combinations of"
            " fixed functions of time. Use weights: {type: basis, basis: cosine, dim: K}."
        )
    if not isinstance(config.weights, PerLayerConfig):
        raise UserError(
            f"the base is already a flow: its weights, of type {_kind(config.weights)}, are functions of time. Give a"
            " model with ordinary layers (GPT-2, Llama, weights: per_layer)."
        )
    if config.control is not None:
        raise UserError(
            "the base has a control signal, and only layers without control can be fitted. Give a model without"
            " control."
        )
    if align and not isinstance(config.block, Gpt2BlockConfig | LlamaBlockConfig):
        raise UserError(
            f"layers of type {_kind(config.block)} cannot be aligned, only those of GPT-2 and Llama. Fit them without"
            " alignment: --align false."
        )
    check_enough_layers(_basis(weights, config.plan.times), config.plan.times)
    return weights


def aligned(model: NeuralOdeLMHeadModel, step: Callable[[str], Any] = lambda name: None) -> NeuralOdeLMHeadModel:
    """The same function, its layers in one order (`qkvflow.models.alignment.align`)."""
    return _with_weights(model, align(model.transformer.flow.weights, step), model.config.weights)


def lift(model: NeuralOdeLMHeadModel, weights: BasisConfig) -> tuple[NeuralOdeLMHeadModel, Fit]:
    """The model with W(t) fitted to its layers at their times, and how near W(t) comes.

    Its depth is that of the layers, with steps of length 1 where theirs are: with as many functions as layers, the flow
    is the model.

    Raises:
        UserError: see `check_liftable`.
    """
    check_liftable(model.config, weights, align=False)
    layers = model.transformer.flow.weights
    found = fit(layers, _basis(weights, layers.times))
    return _with_weights(model, found.weights, weights), found


def _with_weights(model: NeuralOdeLMHeadModel, block, weights: WeightsConfig) -> NeuralOdeLMHeadModel:
    return model.with_weights(block, dataclasses.replace(model.config, weights=weights))


def _basis(weights: BasisConfig, times: Sequence[float]) -> FunctionBasis:
    """The functions of time for layers at these times."""
    return FunctionBasis(weights.basis, weights.dim, right_closed=times[0] > 0.0)


def _kind(config) -> str:
    return config.get_choice_name(type(config))
