"""YAML `mode:` what is fine-tuned: the flow itself, the ordinary model that it becomes at M steps, or LoRA."""

import abc
import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import draccus
import equinox as eqx
import jax
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.utils.types import FilterTree

from qkvflow.errors import Notice, UserError
from qkvflow.models import NeuralOdeConfig, is_flow, lora
from qkvflow.ranges import Count, Positive, ProperShare
from qkvflow.weights import BasisConfig, PerLayerConfig, refine


@dataclass(frozen=True)
class FinetuneMode(draccus.ChoiceRegistry, abc.ABC):
    """From a base model to the one that is trained."""

    @abc.abstractmethod
    def model_config(self, base: LmConfig, steps: int | None) -> Any:
        """The configuration of the trained model at `steps` steps, by default those of the base.

        Raises:
            UserError: the base is not available at that depth.
        """

    @abc.abstractmethod
    def adapt(self, base: LmHeadModel, config: Any, *, key: jax.Array) -> LmHeadModel:
        """The model to train: at the first step the base's function at the depth of `config`, a `model_config`."""

    def trainable(self, model: eqx.Module) -> FilterTree:
        """What of the adapted model is trained, as Levanter's filter; everything unless a mode says otherwise."""
        del model
        return True

    @property
    def stores_base(self) -> bool:
        """Whether checkpoints hold the whole model, so that the base is not needed again."""
        return True


@FinetuneMode.register_subclass("flow")
@dataclass(frozen=True)
class FlowMode(FinetuneMode):
    """Keeps the ODE and trains the functions of time W(t), evaluated at M steps.

    Attributes:
        refine: K, for `weights: {type: basis}`: before training, W(t) is expressed in a basis of K functions, exactly
            if the finer basis can represent it (`qkvflow.weights.refine`).
    """

    refine: Count | None = None

    def model_config(self, base: LmConfig, steps: int | None) -> Any:
        if not is_flow(base):
            raise UserError(
                "mode: flow trains weights that are functions of time, but this base has ordinary layers. Use mode:"
                " {type: full} or {type: lora}."
            )
        if self.refine is not None:
            base = self._refined(base)
        if steps is None:
            final = base.depth.stages[-1]  # of one that grew, the last depth
            return base if len(base.depth.stages) == 1 else dataclasses.replace(base, depth=final)
        sampling = "fixed" if base.depth.is_adaptive else base.depth.time_sampling
        kept: dict[str, Any] = {"kinetic_weight": base.depth.kinetic_weight}
        if not base.depth.is_adaptive:
            kept["adjoint"] = base.depth.adjoint
        return dataclasses.replace(base, depth=base.depth.on_grid(steps, time_sampling=sampling, **kept))

    def adapt(self, base: LmHeadModel, config: Any, *, key: jax.Array) -> LmHeadModel:
        del key
        if self.refine is not None:
            base = refine(base, self.refine)
        return base.with_depth(config.depth)

    def _refined(self, base: NeuralOdeConfig) -> NeuralOdeConfig:
        weights = base.weights
        if not isinstance(weights, BasisConfig):
            raise UserError(
                f"mode.refine: {self.refine} is for weights in a basis (weights: {{type: basis}}), but the weights of"
                f" this base are {weights.get_choice_name(type(weights))}. Leave it out."
            )
        if self.refine is not None and self.refine < weights.dim:
            raise UserError(
                f"mode.refine: {self.refine} functions of time are fewer than the {weights.dim} of the base and cannot"
                f" represent its weights. Give at least {weights.dim}."
            )
        return dataclasses.replace(base, weights=weights.refined(self.refine))


@FinetuneMode.register_subclass("full")
@dataclass(frozen=True)
class FullMode(FinetuneMode):
    """Converts the flow to an ordinary model of M layers and trains all its weights."""

    def model_config(self, base: LmConfig, steps: int | None) -> Any:
        if isinstance(base, NeuralOdeConfig):
            if steps is None and base.depth.is_adaptive:
                raise UserError("an adaptive flow has no fixed number of steps: give `steps: M`.")
            _tell_dropped(base, steps)
            return base.at_depth(base.depth.reading_steps if steps is None else steps)
        layers = getattr(base, "num_layers", None)
        if steps not in (None, layers):
            raise UserError(
                f"`steps` is {steps}, but the base is an ordinary model (type {base.get_choice_name(type(base))}) of"
                f" {layers} layers, which has only this depth. Leave `steps` out."
            )
        return base

    def adapt(self, base: LmHeadModel, config: Any, *, key: jax.Array) -> LmHeadModel:
        del key
        if not isinstance(config, NeuralOdeConfig):
            return base
        return base.discretise(config.depth.steps)


def _tell_dropped(base: NeuralOdeConfig, steps: int | None) -> None:
    """A notice where ordinary layers are read at fewer times than there are."""
    layers = base.depth.reading_steps
    if isinstance(base.weights, PerLayerConfig) and steps is not None and steps < layers and layers % steps == 0:
        kept = f"`steps` is {steps}, but the base has {layers} ordinary layers, of which {steps} are kept and the rest"
        warnings.warn(Notice(f"{kept} dropped. To keep all, leave `steps` out."), stacklevel=2)


@FinetuneMode.register_subclass("stack")
@dataclass(frozen=True)
class StackMode(FinetuneMode):
    """A deeper ordinary model made of copies of the base's layers; trains all weights.

    L layers become M = n L: layer k is a copy of the base's layer k mod L (`stack`: the whole stack on top of itself;
    Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking"; Du et al. 2024, G_stack) or k div n
    (`repeat`: each layer n times in a row). For weights that are no functions of time it is the counterpart of depth
    that grows. The model's function changes.

    Attributes:
        order: `stack` or `repeat`.
    """

    order: Literal["stack", "repeat"] = "stack"

    def model_config(self, base: LmConfig, steps: int | None) -> Any:
        if not isinstance(base, NeuralOdeConfig) or not isinstance(base.weights, PerLayerConfig):
            raise UserError(
                "mode: stack copies the layers of an ordinary model (type: neuralode, weights: {type: per_layer}), and"
                " this base has none. A flow can change depth without copies: mode: {type: flow}."
            )
        layers = base.depth.reading_steps
        if len(base.plan.times) != layers:
            raise UserError(
                f"mode: stack needs one layer per step, but the solver {base.depth.solver} has {len(base.plan.times)}"
                f" for {layers} steps. Use a base with the solver euler."
            )
        if steps is None or steps <= layers or steps % layers:
            raise UserError(
                f"mode: stack multiplies the {layers} layers of the base by 2, 3, ...: `steps` must be a larger"
                f" multiple of {layers}, got {steps}."
            )
        return base.at_depth(steps)

    def adapt(self, base: LmHeadModel, config: Any, *, key: jax.Array) -> LmHeadModel:
        del key
        weights, times = base.transformer.flow.weights, config.plan.times
        layers = len(weights.times)
        copies = len(times) // layers
        rows = [k % layers if self.order == "stack" else k // copies for k in range(len(times))]
        return base.with_weights(weights.copied(rows, times), config)


@FinetuneMode.register_subclass("lora")
@dataclass(frozen=True)
class LoraMode(FullMode):
    """Freezes the ordinary model of M layers and trains low-rank terms (alpha / r) B A for its linear maps W.

    Attributes:
        r: the rank.
        alpha: the low-rank terms are scaled by alpha / r.
        dropout: dropout of the input of A.
        target_modules: path suffixes of linear maps (`[c_attn, mlp.c_fc]`) or a regular expression; null means all.
        train_embeddings: also train the input embeddings.
        a_init: initialisation of A: `normal`, or `uniform` as in PEFT, sqrt(3) narrower; the two need different
            learning rates.
    """

    r: Count = 8
    alpha: Positive = 8.0
    dropout: ProperShare = 0.0
    target_modules: list[str] | str | None = None
    train_embeddings: bool = False
    a_init: Literal["normal", "uniform"] = "normal"

    def adapt(self, base: LmHeadModel, config: Any, *, key: jax.Array) -> LmHeadModel:
        ordinary = super().adapt(base, config, key=key)
        return lora.add_lora(
            ordinary, self.r, self.alpha, self.dropout, self.target_modules, a_init=self.a_init, key=key
        )

    def trainable(self, model: eqx.Module) -> FilterTree:
        return lora.trainable(model, embeddings=self.train_embeddings)

    @property
    def stores_base(self) -> bool:
        return False
