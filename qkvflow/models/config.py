"""YAML `model: {type: neuralode}`: a point of weights x block x depth, registered as a Levanter `LmConfig`."""

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeGuard

from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel

from qkvflow.axes import EMBED
from qkvflow.blocks import BlockConfig, Gpt2BlockConfig
from qkvflow.blocks.config import check_choice
from qkvflow.depth import AbstractPlan, DepthConfig, FixedPlan
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Positive, Range, check_ranges
from qkvflow.weights import GeneratedConfig, PerLayerConfig, WeightsConfig


@dataclass(frozen=True)
class ControlConfig:
    """A control signal of `dim` components and a shift by layer-time are added to the input of the vector field, and
    its output is scaled by a learned alpha: the ODE flow hybrid. See `qkvflow.blocks.controlled`.

    Attributes:
        dim: components of the control signal.
        alpha: initial value of the scale of the output.
    """

    dim: Count = 4
    alpha: Annotated[float, Range()] = 0.1

    def __post_init__(self):
        check_ranges(self)


@LmConfig.register_subclass("neuralode")
@dataclass(frozen=True)
class NeuralOdeConfig(LmConfig):
    """x(0) = embed(tokens);  dx/dt = B(x; W(t)), t in [0, 1];  logits = head(norm(x(1))).

    Attributes:
        max_seq_len: maximum number of tokens in a sequence.
        hidden_dim: the width of the state x.
        block: what B is.
        weights: what W(t) is.
        depth: how the model travels from t = 0 to t = 1.
        prelude_layers, coda_layers: ordinary layers (per-layer weights, x + B(x)) before and after the flow.
        ordinary_form: the form of their block: `sequential` or `parallel`.
        control: the flow receives a control signal; None for a model without control.
        embedding_multiplier: m in x(0) = m embed(tokens); the head shares the embeddings without it. With 50, x(0)
            starts with components of about 1, and a flow of smooth weights can follow its ODE (docs/depth.md).
        gradient_checkpointing: of the ordinary layers; the flow uses `depth.adjoint`. It is selective with `adjoint:
            selective`.
    """

    max_seq_len: Count = 1024
    hidden_dim: Count = 768
    prelude_layers: Annotated[int, Range(at_least=0)] = 0
    coda_layers: Annotated[int, Range(at_least=0)] = 0
    ordinary_form: str = "sequential"
    block: BlockConfig = field(default_factory=Gpt2BlockConfig)
    weights: WeightsConfig = field(default_factory=GeneratedConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    control: ControlConfig | None = None
    embedding_multiplier: Positive = 1.0
    gradient_checkpointing: bool = True

    model_class: ClassVar[type[LmHeadModel]]  # set where the model is defined, which needs this configuration

    def __post_init__(self):
        check_ranges(self)
        check_choice("ordinary_form", self.ordinary_form, ("sequential", "parallel"))
        if self.ordinary_form != "sequential" and not self.prelude_layers + self.coda_layers:
            raise UserError(
                f"ordinary_form: {self.ordinary_form} is for the layers around the flow, but there are none. Set"
                " prelude_layers or coda_layers; the form of the flow is block.form."
            )
        self.block.check(self.Embed)
        is_one_grid = not (self.depth.is_general or self.training_plans) and len(self.depth.stages) == 1
        if isinstance(self.weights, PerLayerConfig) and not is_one_grid:
            raise UserError(
                "weights: per_layer only has weights at the times of one fixed grid: adaptive steps, adjoint:"
                " backsolve, time_sampling: jitter and a range of steps or steps that grow need weights that are"
                " functions of time (generated, modulated, basis, constant)."
            )
        if self.block.depends_on_step and self.depth.time_sampling == "jitter":
            raise UserError(
                "block: {form: split} needs steps whose lengths are known when the model is compiled, but"
                " time_sampling: jitter draws them at random. Use a range of steps instead (steps: {min: 3, max: 12}),"
                " or form: parallel."
            )
        if self.depth.adjoint == "backsolve":
            for name, value in vars(self.block).items():
                if name.endswith("_pdrop") and name != "embed_pdrop" and value > 0:
                    raise UserError(
                        "adjoint: backsolve solves the field backwards in time, which does not work with a random"
                        f" dropout mask in each step: set block.{name}: 0.0, or use adjoint: checkpoint or reversible."
                    )

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden_dim)

    @property
    def model_type(self) -> type[LmHeadModel]:
        return self.model_class

    @property
    def plan(self) -> AbstractPlan:
        """Where and how the flow is evaluated in layer-time."""
        return self.depth.plan(self.weights.evaluate)

    @property
    def training_plans(self) -> tuple[FixedPlan, ...]:
        """The plans of which one is drawn for each training batch; none if training uses `plan`."""
        return self.depth.training_plans(self.weights.evaluate)

    @property
    def travel(self) -> dict[str, Any]:
        """The settings of a flow from `depth`: its plans, and its additional outputs."""
        kinetic = self.depth.kinetic_weight > 0.0
        return {"plan": self.plan, "training_plans": self.training_plans, "kinetic": kinetic}

    @property
    def field_times(self) -> tuple[float, ...]:
        """Where the solver evaluates the field, as far as that is known before: at 0 for steps of adaptive length."""
        return (0.0,) if self.plan.grid is None else self.plan.grid.times

    def ordinary_plan(self, layers: int) -> AbstractPlan:
        """The plan of `layers` ordinary residual layers."""
        adjoint = "selective" if self.depth.adjoint == "selective" else "checkpoint"
        adjoint = adjoint if self.gradient_checkpointing else "direct"
        depth = DepthConfig(solver="euler", steps=layers, step_size="residual", adjoint=adjoint)
        return depth.plan(PerLayerConfig().evaluate)

    @property
    def ordinary_block(self) -> BlockConfig:
        """The block of the prelude and coda."""
        has_forms = any(field.name == "form" for field in dataclasses.fields(self.block))
        return dataclasses.replace(self.block, form=self.ordinary_form) if has_forms else self.block

    def at_depth(self, steps: int) -> "NeuralOdeConfig":
        """The configuration of this model discretised at `steps` steps: per-layer weights on that grid."""
        depth = self.depth.on_grid(steps, evaluate="auto")
        return dataclasses.replace(self, weights=PerLayerConfig(), depth=depth)

    @property
    def stages(self) -> tuple["NeuralOdeConfig", ...]:
        """The model of each stage of training: itself alone, unless its depth grows."""
        return tuple(dataclasses.replace(self, depth=depth) for depth in self.depth.stages)

    @property
    def reading(self) -> "NeuralOdeConfig":
        """The model outside training: on its own grid, without random steps."""
        return dataclasses.replace(self, depth=self.depth.on_grid()) if self.training_plans else self

    def flops_per_token(self, vocab_size: int, context_length: int) -> float | None:
        """Forward FLOPs per token in training: block evaluations and head. Generating W(t) costs extra, once per batch.

        The mean, if the steps of a batch are drawn at random; outside training, `reading.flops_per_token`. None with
        adaptive steps, whose number is not known in advance.
        """
        evaluations = self.plan.evaluations
        if evaluations is None:
            return None
        if self.training_plans:
            evaluations = statistics.fmean(plan.evaluations for plan in self.training_plans)
        evaluations += self.prelude_layers + self.coda_layers
        block = self.block.flops_per_token(self.hidden_dim, context_length)
        return evaluations * block + 2 * self.hidden_dim * vocab_size


def is_flow(config: object) -> TypeGuard[NeuralOdeConfig]:
    """Whether a model's weights are functions of time, so that it can be evaluated with other steps."""
    return isinstance(config, NeuralOdeConfig) and not isinstance(config.weights, PerLayerConfig)
