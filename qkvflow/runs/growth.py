"""Continuing a run whose depth grows: the fractions of a longer training must not lead back to fewer steps."""

from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig


def check_depth_goes_on(stored: TrainConfig, config: TrainConfig, last_step: int) -> None:
    """For a run that continues after `last_step` as `config` says, which has begun as `stored` says.

    Raises:
        UserError: it has grown, and would fall back to fewer steps of its solver.
    """
    before, after = (getattr(getattr(each.model, "depth", None), "steps", None) for each in (stored, config))
    grows = all(hasattr(steps, "kept_in") for steps in (before, after))  # models that grow are ours, on a higher floor
    old, new = stored.trainer.num_train_steps, config.trainer.num_train_steps
    if last_step < 0 or not grows:
        return
    reached, continued = before.at(last_step, old), after.at(last_step + 1, new)
    if continued < reached:
        raise UserError(
            f"the run has grown to {reached} steps of its solver, but of {new} training steps the fractions of"
            f" `model.depth.steps` put step {last_step + 1} into the stage with {continued}. Nothing was changed. To go"
            f" on at the depth that it has, add{flag_for_growth(stored, new)}"
        )


def flag_for_growth(stored: TrainConfig, longer: int) -> str:
    """The flag, after a space, with which a training that is `longer` keeps the stages of a depth that grows; empty for
    others."""
    steps = getattr(getattr(stored.model, "depth", None), "steps", None)
    if not hasattr(steps, "kept_in"):
        return ""
    pairs = steps.kept_in(stored.trainer.num_train_steps, longer).grow.pairs
    return f" --model.depth.steps '{{grow: {{{', '.join(f'{fraction!r}: {steps}' for fraction, steps in pairs)}}}}}'"
