"""The costs of models before training: parameters, FLOPs, memory of a step; and the width of equal cost."""

import bisect
import contextlib
import dataclasses
import itertools
import operator
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import jax
from haliax import Axis
from levanter.utils.jax_utils import parameter_count

from experiments.recipes import Recipe
from experiments.records import kept, stored
from qkvflow.depth import StepGrowth
from qkvflow.errors import UserError
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel, cost
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.training.checks import model_shape
from qkvflow.training.description import vocabulary_size
from qkvflow.training.levanter_config import jax_configured

# A model keeps its width, or takes one with an even head size, if that misses the parameters by no larger fraction.
SAME_PARAMETERS = 0.05
_UNITS = 2**14
# Keys that do not change the memory of a training step, with one value for all recipes.
_NOT_OF_MEMORY = {
    "trainer": {"id": "", "seed": 0, "num_train_steps": 1, "steps_per_eval": 1, "max_eval_batches": None},
    "optimizer": {"learning_rate": 1.0},
}


@dataclass(frozen=True)
class Cost:
    """
    Attributes:
        parameters: trained ones. materialised: those of the equivalent ordinary model at its depth.
        evaluations: of blocks, or layers, per token; the mean if their number is random or grows.
        flops: of a training step: forward, backward and generation of weights, without recomputation
            (`qkvflow.models.cost`); the mean if the number of evaluations is random or grows.
        tokens: of a training step. memory: peak bytes, if requested (`with_memory`).
        stages: (fraction of training at which it starts, FLOPs of a step); one, unless depth grows.
    """

    parameters: int
    materialised: int
    evaluations: int | float
    flops: float
    tokens: int
    memory: int | None = None
    stages: list[tuple[float, float]] = field(default_factory=list)

    @property
    def grows(self) -> bool:
        """Whether the cost of a step changes during a training."""
        return len(self.stages) > 1

    def spent(self, step: int, steps: int) -> float:
        """FLOPs of the first `step` of `steps` training steps."""
        begun = [(fraction * steps, flops) for fraction, flops in self.stages or [(0.0, self.flops)]]
        ends = [begin for begin, _ in begun[1:]] + [float(steps)]
        return sum(max(0.0, min(step, end) - begin) * flops for (begin, flops), end in zip(begun, ends, strict=True))


def cost_of(recipe: Recipe) -> Cost:
    """The costs of a configuration of train_lm.

    Raises:
        UserError: its number of FLOPs is unknown, as with adaptive steps, or its batches have several sizes.
    """
    config = recipe.config
    vocab = vocabulary_size(config)
    shape = model_shape(config.model, Axis("vocab", vocab))
    own, entered = enter_config(config.model), enter(shape)
    growth = own.depth.steps
    begins = [fraction for fraction, _ in growth.grow.pairs] if isinstance(growth, StepGrowth) else [0.0]
    each = [_step(stage, entered, vocab, recipe) for stage in own.stages]
    shares = [end - begin for begin, end in itertools.pairwise([*begins, 1.0])]
    evaluations, flops = (sum(map(operator.mul, shares, own)) for own in zip(*each, strict=True))
    sizes = parameter_count(shape), parameter_count(cost.discretised(entered))
    stages = [(begin, flops) for begin, (_, flops) in zip(begins, each, strict=True)]
    return Cost(*sizes, evaluations, flops, recipe.tokens, stages=stages)


def _step(
    stage: NeuralOdeConfig, entered: NeuralOdeLMHeadModel, vocab: int, recipe: Recipe
) -> tuple[int | float, float]:
    """Evaluations and FLOPs of a training step of a stage; means if its number of evaluations is random."""
    length, plans = recipe.config.Pos.size, stage.training_plans or (stage.plan,)
    flops, evaluations = cost.flops(stage, entered, vocab, length), cost.evaluations(stage)
    if flops is None or evaluations is None:
        raise UserError(
            f"the FLOPs of {recipe.raw['model'].get('type')} are not known: compare models with a fixed number of steps"
        )
    more = statistics.fmean(plan.evaluations for plan in plans) - stage.plan.evaluations
    generation = flops.generation * statistics.fmean(p.weight_evaluations for p in plans)
    generation /= stage.plan.weight_evaluations
    forward = flops.forward + more * stage.block.flops_per_token(stage.hidden_dim, length)
    return evaluations + more if more else evaluations, 3 * (recipe.tokens * forward + generation)


def width_with(recipe: Recipe, parameters: int) -> int:
    """The `hidden_dim` at which the number of parameters is close to `parameters`.

    It is its own, if that misses by no more than `SAME_PARAMETERS`. Otherwise it is a multiple of twice the heads; or
    of the heads (odd head sizes), where the former misses by more than that.
    """
    model = recipe.config.model
    if abs(_size(recipe) / parameters - 1) <= SAME_PARAMETERS:
        return model.Embed.size
    heads = getattr(getattr(model, "block", model), "num_heads", 1)
    width, found = _nearest(recipe, parameters, 2 * heads)
    if abs(found / parameters - 1) > SAME_PARAMETERS:
        with contextlib.suppress(UserError):  # rotary positions need even head sizes
            width, _ = _nearest(recipe, parameters, heads)
    return width


def _nearest(recipe: Recipe, parameters: int, unit: int) -> tuple[int, int]:
    """The multiple of `unit` with the closest number of parameters, and that number."""

    def size(units: int) -> int:
        return _size(recipe.but({"model": {"hidden_dim": units * unit}}))

    above = 2 + bisect.bisect_left(range(2, _UNITS), parameters, key=size)
    units = min((above - 1, above), key=lambda units: abs(size(units) - parameters))
    return unit * units, size(units)


def _size(recipe: Recipe) -> int:
    """The number of its parameters."""
    config = recipe.config
    return parameter_count(model_shape(config.model, Axis("vocab", vocabulary_size(config))))


def with_memory(own: Cost, recipe: Recipe, path: Path, compiles: bool = True) -> Cost:
    """Adds the peak memory of a training step, by XLA's count: arguments, results and temporary arrays.

    It is determined by compiling, and cached at `path`, with the platform in its name; otherwise only taken from there.
    """
    platform, parts = jax.default_backend(), recipe.raw["trainer"].get("per_device_parallelism", -1)
    vocab = vocabulary_size(recipe.config)
    asked = {"recipe": recipe.but(_NOT_OF_MEMORY).digest(), "vocab": vocab, "jax": jax.__version__, "parts": parts}
    path = path.with_stem(f"{path.stem}-{platform}")

    def make() -> int:
        with jax_configured(recipe.config.trainer):
            return compile_ahead(recipe.config, vocab).memory

    return dataclasses.replace(own, memory=kept(path, int, asked, make) if compiles else stored(path, int, asked))
