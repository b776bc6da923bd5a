"""Steps whose loss or update is not finite: detected in the step itself, then fatal, or skipped and counted."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax.jax_utils import is_jax_array_like
from levanter.schedule import BatchSchedule
from levanter.trainer_state import TrainerState

from qkvflow.errors import UserError
from qkvflow.inside.levanter import StepTrainer
from qkvflow.models.loss import mean_weight

_REMEDIES = (
    "Usual remedies: a smaller `optimizer.learning_rate`, more `optimizer.warmup`, `optimizer.max_grad_norm: 1.0`, or"
    " `trainer.mp: f32`; with adaptive steps (`model.depth.rtol`) also a larger `model.depth.max_steps`: a solve that"
    " reaches this limit gives NaN"
)


class FiniteTrainer(StepTrainer):
    """Levanter's trainer, whose steps report a NaN loss if they make parameters or optimizer state non-finite.

    Differs from Levanter, which only checks the loss: a non-finite gradient with a finite loss damages the parameters
    one step, and perhaps one checkpoint, before it is detected.

    Attributes:
        skips: a step that is not finite changes neither parameters nor the optimizer's state (its count of steps, and
            so the learning rate, included), nor averages of parameters.
    """

    skips: bool = False

    def whole(self, *batch: Any) -> Any:
        """The mean weight of a token of a batch that is computed in parts (see `part_of`); else None."""
        part = self.config.microbatch_size
        if part is None or part >= batch[0].loss_weight.axis_size(self.config.batch_axis_name):
            return None
        return mean_weight(batch[0].loss_weight)

    def see(self, state: TrainerState, result: Any) -> Any:
        stays = _stays_finite(_learned(state), _learned(result.new_state))
        is_good = stays & jnp.isfinite(result.loss)
        result.loss = jnp.where(jnp.isfinite(result.loss) & ~stays, jnp.nan, result.loss)
        if self.skips:
            kept = jax.tree.map(
                lambda new, old: jnp.where(is_good, new, old) if is_jax_array_like(new) else new,
                _learned(result.new_state),
                _learned(state),
            )
            result.new_state = eqx.tree_at(_learned, result.new_state, kept, is_leaf=lambda x: x is None)
        return result


class BadSteps:
    """Counts the skipped steps; more than `limit` in a row end the training.

    Attributes:
        total: skipped by this process.
    """

    def __init__(self, limit: int, in_a_row: int = 0):
        """
        Args:
            in_a_row: the steps before that were skipped, by an earlier process.
        """
        self.limit = limit
        self.total, self.in_a_row = 0, in_a_row

    def see(self, loss: float) -> bool:
        """Whether the step with this loss was skipped.

        Raises:
            TooManyBadSteps: more steps in a row are not finite than may be skipped.
        """
        if not self.limit or math.isfinite(loss):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise TooManyBadSteps
        return True


class TooManyBadSteps(Exception):
    """More steps in a row were not finite than may be skipped."""


class Diverged(UserError):
    """Training ended because its loss, or its gradient, is not finite."""


def stopped_at(step: int, what: str, data: str, last_checkpoint: int | None, limit: int) -> Diverged:
    """What to tell when training ends because of a step that is not finite.

    Args:
        what: of the loss.
        data: the position in the data, see `data_position`.
        last_checkpoint: step of the newest one; None without any.
        limit: how many such steps in a row are skipped.
    """
    kept = "there is no checkpoint yet" if last_checkpoint is None else f"the last checkpoint is step-{last_checkpoint}"
    row = f", as in the {limit} steps before it, which were skipped" if limit else ""
    skip = "" if limit else ". To skip single steps of this kind: `max_skipped_steps: 10` (with --accept_changes true)"
    return Diverged(
        f"the training loss, or its gradient, is {what} at step {step}{row} ({data}); {kept}. {_REMEDIES}{skip}"
    )


def data_position(schedule: BatchSchedule, step: int, per_epoch: int | None) -> str:
    """The sequences of a step: first and last index in the order of training, and the epochs that they are from."""
    first = schedule.global_data_offset_by_step(step)
    last = first + schedule.batch_size_at_step(step) - 1
    text = f"sequences {first} to {last} of the training order"
    if per_epoch is None:
        return text
    epochs = sorted({first // per_epoch + 1, last // per_epoch + 1})
    return f"{text}, epoch {' to '.join(map(str, epochs))} of {per_epoch} sequences each"


def _learned(state: TrainerState) -> tuple:
    return state.model, state.opt_state, state.model_averaging


def _stays_finite(old: tuple, new: tuple) -> jax.Array:
    """Whether all arrays are finite, and all single numbers that were.

    Some optimizers begin with an infinite number, such as the best value so far; the arrays are read once only.
    """

    def is_good(before, after):
        finite = jnp.isfinite(after)
        return jnp.all(finite if after.ndim else finite | ~jnp.isfinite(before))

    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    checks = [
        is_good(before, after)
        for before, after in pairs
        if is_jax_array_like(after) and jnp.issubdtype(after.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack(checks)) if checks else jnp.array(True)
