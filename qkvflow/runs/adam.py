"""`optimizer: {type: adam}`: Levanter's Adam, with a separate rate for the projections of generated weights."""

from dataclasses import dataclass

import optax
from levanter.optim import AdamConfig

from qkvflow.errors import UserError
from qkvflow.inside.draccus import replace_choice
from qkvflow.models.generated_scale import check_choice, scale_generated


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
            unaffected.
    """

    generated_scale: str = "none"

    def __post_init__(self):
        super().__post_init__()
        check_choice(self.generated_scale)
        others = ("update_rms_clipping", "clip_update_norm", "skip_bad_steps", "adamc_weight_decay")
        if self.generated_scale != "none" and any(getattr(self, name) for name in others):
            name = next(name for name in others if getattr(self, name))
            raise UserError(
                f"generated_scale: {self.generated_scale} cannot be combined with {name}: leave one of them out."
            )

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Adam's direction, divided for projections, then decoupled decay, then the rate."""
        if self.generated_scale == "none":
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
