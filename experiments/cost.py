"""What models cost, before anything is trained: parameters, FLOPs, memory of a step; and which width costs as much."""

import contextlib
from dataclasses import dataclass

from haliax import Axis
from levanter.utils.jax_utils import parameter_count

from experiments.recipes import Recipe
from qkvflow.describe import vocabulary_size
from qkvflow.errors import UserError
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.models import cost
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.training.checks import model_shape

_NEAR = 0.05


@dataclass(frozen=True)
class Cost:
    """
    Attributes:
        parameters: what is trained. materialised: of the ordinary model that it becomes at its depth.
        evaluations: of blocks, or layers, that a token passes; the mean where their number is drawn.
        flops: of a training step: forward, backward and generation of weights, without what is recomputed
            (`qkvflow.models.cost`).
        tokens: of a training step. memory: bytes of its peak, if it was asked for (`step_memory`).
    """

    parameters: int
    materialised: int
    evaluations: int | float
    flops: float
    tokens: int
    memory: int | None = None


def cost_of(recipe: Recipe) -> Cost:
    """The costs of a configuration of train_lm.

    Raises:
        UserError: if its number of FLOPs is not known, as with adaptive steps.
    """
    config = recipe.config
    vocab = vocabulary_size(config)
    shape = model_shape(config.model, Axis("vocab", vocab))
    own, entered = enter_config(config.model), enter(shape)
    flops, evaluations = cost.flops(own, entered, vocab, config.Pos.size), cost.evaluations(own)
    if flops is None or evaluations is None:
        raise UserError(
            f"the FLOPs of {recipe.raw['model'].get('type')} are not known: compare models with a fixed number of steps"
        )
    a_step = recipe.tokens * (flops.forward + flops.backward) + 3 * flops.generation
    return Cost(parameter_count(shape), parameter_count(cost.discretised(entered)), evaluations, a_step, recipe.tokens)


def width_with(recipe: Recipe, parameters: int) -> int:
    """The `hidden_dim` at which the model has most nearly so many parameters.

    It is a multiple of twice the heads; or of the heads, where the former misses by more than 5 % and odd heads can be.
    """
    model = recipe.raw["model"]
    heads = model.get("block", model).get("num_heads", 1)
    width, found = _nearest(recipe, parameters, 2 * heads)
    if abs(found / parameters - 1) > _NEAR:
        with contextlib.suppress(UserError):  # rotary positions want even heads
            width, _ = _nearest(recipe, parameters, heads)
    return width


def _nearest(recipe: Recipe, parameters: int, unit: int) -> tuple[int, int]:
    """The multiple of `unit` with most nearly so many parameters, and how many it has."""

    def size(units: int) -> int:
        config = recipe.but({"model": {"hidden_dim": units * unit}}).config
        return parameter_count(model_shape(config.model, Axis("vocab", vocabulary_size(config))))

    low, high = 1, 2
    while size(high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < parameters else (low, middle)
    units = min((low, high), key=lambda units: abs(size(units) - parameters))
    return unit * units, size(units)


def step_memory(recipe: Recipe) -> int:
    """Bytes that a training step needs at its peak, by XLA's count: arguments, results and temporary arrays."""
    return compile_ahead(recipe.config, vocabulary_size(recipe.config)).memory
