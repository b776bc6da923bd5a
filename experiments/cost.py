"""What models cost, before anything is trained: parameters, FLOPs, memory of a step; and which width costs as much."""

from dataclasses import dataclass
from typing import Any

from haliax import Axis
from levanter.utils.jax_utils import parameter_count

from qkvflow.cli import decode
from qkvflow.describe import vocabulary_size
from qkvflow.errors import UserError
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.models import cost
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import model_shape


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
    flops, evaluations = cost.flops(config.model, shape, vocab, length), cost.evaluations(config.model)
    if flops is None or evaluations is None:
        raise UserError(
            f"the FLOPs of {raw['model'].get('type')} are not known: compare models with a fixed number of steps"
        )
    tokens = config.trainer.batch_schedule.batch_size_at_step(0) * length
    a_step = tokens * (flops.forward + flops.backward) + 3 * flops.generation
    return Cost(parameter_count(shape), parameter_count(cost.discretised(shape)), evaluations, a_step, tokens)


def width_with(raw: dict[str, Any], parameters: int) -> int:
    """The `hidden_dim` at which the model has most nearly so many parameters; a multiple of twice its heads."""
    block = raw["model"].get("block", raw["model"])
    unit = 2 * block.get("num_heads", 1)

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
    return unit * min((low, high), key=lambda units: abs(size(units) - parameters))


def step_memory(raw: dict[str, Any]) -> int:
    """Bytes that a training step needs at its peak, by XLA's count: arguments, results and temporary arrays."""
    config = decode(TrainConfig, raw)
    return compile_ahead(config, vocabulary_size(config)).memory
