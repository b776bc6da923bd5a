"""`optimizer: {type: adam}`: Levanter's Adam, with a separate rate for the projections of generated weights."""

import dataclasses
import warnings
from dataclasses import dataclass

import optax
from levanter.optim import AdamConfig, OptimizerConfig

from qkvflow.errors import Notice, UserError
from qkvflow.inside.draccus import replace_choice
from qkvflow.models.generated_scale import check_choice, scale_generated
from qkvflow.weights import GeneratedConfig


@dataclass(frozen=True)
class ScaledAdamConfig(AdamConfig):
    """Levanter's `AdamConfig`.

    Attributes:
        learning_rate: the peak; `lr_schedule`, `warmup` and `decay` set how it rises and falls.
        weight_decay: decoupled from the gradient, see `weight_decay_on`.
        beta1, beta2, epsilon: Adam's parameters.
        max_grad_norm: gradients are clipped to this global norm; null disables clipping.
        generated_scale: `sum_e` divides the updates of the projections P of generated weights by the sum of |e(t)|
            (`qkvflow.models.generated_scale`), so that one learning rate suits all T; `none` does not. Decay is
            unaffected. By default `sum_e`; `none` for weights with `init: official`, as in the paper's code.
    """

    generated_scale: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.generated_scale is not None:
            check_choice(self.generated_scale)
        if self.generated_scale == "sum_e" and self._excluding:
            raise UserError(
                f"generated_scale: sum_e cannot be combined with {self._excluding[0]}: leave one of them out."
            )

    @property
    def _excluding(self) -> list[str]:
        """The options that are set and exclude a separate rate."""
        others = ("update_rms_clipping", "clip_update_norm", "skip_bad_steps", "adamc_weight_decay")
        return [name for name in others if getattr(self, name)]

    def tell_if_idle(self, weights: object) -> None:
        """A `Notice` if `sum_e` is asked for, and these weights have no projections to scale."""
        if self.generated_scale == "sum_e" and not isinstance(weights, GeneratedConfig):
            words = "has no effect without projections, which `generated` weights have"
            warnings.warn(Notice(f"`optimizer.generated_scale: sum_e` {words}"), stacklevel=2)

    def settled(self, weights: object, before: OptimizerConfig | None = None) -> "ScaledAdamConfig":
        """With `generated_scale` filled in, if it is not given: the default for these weights.

        Args:
            before: the optimizer of a run that is continued, which stays as it was (`none` before there was this key).

        Raises:
            UserError: the default is `sum_e`, and another option excludes that.
        """
        if self.generated_scale is not None:
            return self
        if isinstance(before, ScaledAdamConfig):
            return dataclasses.replace(self, generated_scale=before.generated_scale or "none")
        is_scaled = isinstance(weights, GeneratedConfig) and weights.init != "official"
        if is_scaled and self._excluding:
            raise UserError(
                f"optimizer: {self._excluding[0]} cannot be combined with generated_scale: sum_e, the default for"
                " generated weights. Leave it out, or set generated_scale: none"
            )
        return dataclasses.replace(self, generated_scale="sum_e" if is_scaled else "none")

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Adam's direction, divided for projections, then decoupled decay, then the rate."""
        if self.generated_scale != "sum_e":
            return super().build(num_train_steps)

        def chain(learning_rate):
            clip = [optax.clip_by_global_norm(self.max_grad_norm)] if self.max_grad_norm else []
            adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, nesterov=self.nesterov)
            decay = []
            if self.weight_decay > 0:
                decay = [optax.add_decayed_weights(self.weight_decay, self.build_weight_decay_mask())]
            return optax.chain(*clip, adam, scale_generated(), *decay, optax.scale(-learning_rate))

        return optax.inject_hyperparams(chain)(learning_rate=self.lr_scheduler(num_train_steps))


replace_choice(AdamConfig, ScaledAdamConfig)
