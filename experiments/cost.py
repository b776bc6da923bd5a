"""What models cost, before anything is trained: parameters, FLOPs, memory of a step; and which width costs as much."""

import contextlib
from dataclasses import dataclass
from typing import Any

from haliax import Axis
from levanter.utils.jax_utils import parameter_count

from qkvflow.config import decode
from qkvflow.describe import vocabulary_size
from qkvflow.errors import UserError
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.models import cost
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import model_shape

_NEAR = 0.05


@dataclass(frozen=True)
class Cost:
    """
    parameters: what is trained. materialised: of the ordinary model that it becomes at its depth.
    evaluations: of blocks, or layers, that a token passes.
    flops: of a training step: forward, backward and generation of weights, without what is recomputed
        (`qkvflow.models.cost`).
    tokens: of a training step.
    """

    parameters: int
    materialised: int
    evaluations: int
    flops: float
    tokens: int


def cost_of(raw: dict[str, Any]) -> Cost:
    """The costs of a configuration of train_lm.

    Errors: `UserError` if its number of FLOPs is not known, as with adaptive steps.
    """
    config = decode(TrainConfig, raw)
    vocab = vocabulary_size(config)
    shape = model_shape(config.model, Axis("vocab", vocab))
    length = config.Pos.size
    own, entered = enter_config(config.model), enter(shape)
    flops, evaluations = cost.flops(own, entered, vocab, length), cost.evaluations(own)
    if flops is None or evaluations is None:
        raise UserError(
            f"the FLOPs of {raw['model'].get('type')} are not known: compare models with a fixed number of steps"
        )
    tokens = config.trainer.batch_schedule.batch_size_at_step(0) * length
    a_step = tokens * (flops.forward + flops.backward) + 3 * flops.generation
    return Cost(parameter_count(shape), parameter_count(cost.discretised(entered)), evaluations, a_step, tokens)


def width_with(raw: dict[str, Any], parameters: int) -> int:
    """The `hidden_dim` at which the model has most nearly so many parameters.

    It is a multiple of twice the heads; or of the heads, where the former misses by more than 5 % and odd heads can be.
    """
    heads = raw["model"].get("block", raw["model"]).get("num_heads", 1)
    width, found = _nearest(raw, parameters, 2 * heads)
    if abs(found / parameters - 1) > _NEAR:
        with contextlib.suppress(UserError):  # rotary positions want even heads
            width, _ = _nearest(raw, parameters, heads)
    return width


def _nearest(raw: dict[str, Any], parameters: int, unit: int) -> tuple[int, int]:
    """The multiple of `unit` with most nearly so many parameters, and how many it has."""

    def size(units: int) -> int:
        wide = raw | {"model": raw["model"] | {"hidden_dim": units * unit}}
        config = decode(TrainConfig, wide)
        return parameter_count(model_shape(config.model, Axis("vocab", vocabulary_size(config))))

    low, high = 1, 2
    while size(high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < parameters else (low, middle)
    units = min((low, high), key=lambda units: abs(size(units) - parameters))
    return unit * units, size(units)


def step_memory(raw: dict[str, Any]) -> int:
    """Bytes that a training step needs at its peak, by XLA's count: arguments, results and temporary arrays."""
    config = decode(TrainConfig, raw)
    return compile_ahead(config, vocabulary_size(config)).memory
