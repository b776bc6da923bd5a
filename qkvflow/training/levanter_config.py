"""Levanter's trainer as configured by a run: its own directory, a verified checkpoint, its own loss check."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from levanter.trainer import TrainerConfig

from qkvflow.errors import Notice, UserError, first_line
from qkvflow.runs.checkpoints import Phase, has_checkpoint, sound_checkpoint
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import location_of
from qkvflow.runs.prepare import PreparedRun
from qkvflow.runs.processes import damage_found_together


def configure_jax(trainer: TrainerConfig) -> None:
    """Sets the options of JAX that `trainer.jax_config` names.

    Raises:
        UserError: JAX has no such option, or another type of values.
    """
    for key, value in trainer.jax_config.items():
        try:
            jax.config.update(key, value)
        except (AttributeError, ValueError, TypeError) as error:
            raise UserError(f"trainer.jax_config: JAX does not take {key}: {value!r} ({first_line(error)})") from None


@contextlib.contextmanager
def jax_configured(trainer: TrainerConfig) -> Iterator[None]:
    """`configure_jax` for a `with` block: after it, these options are what they were. For programs that train several
    models, each with its own.

    Raises:
        UserError: as `configure_jax`.
    """
    before = {key: getattr(jax.config, key) for key in trainer.jax_config if hasattr(jax.config, key)}
    try:
        configure_jax(trainer)
        yield
    finally:
        for key, value in before.items():
            jax.config.update(key, value)


def levanter_trainer(run: PreparedRun[TrainConfig], phase: Phase) -> TrainerConfig:
    """A copy of the trainer's configuration that writes into the run directory and reads a checked checkpoint.

    Raises:
        UserError: the checkpoints of `trainer.initialize_from` are damaged, or there is none to load.
    """
    config, trainer = run.config, run.config.trainer
    # Absolute: Levanter takes what is before the first colon of a relative path for the name of a protocol.
    folder, checkpoints = run.directory.path.absolute(), run.directory.checkpoints
    changes: dict[str, Any] = {}
    if run.last_step >= 0:
        # The one that was compared with its checksums: Levanter would choose by itself.
        checkpoint = checkpoints / f"step-{run.last_step}"
        changes |= {"load_checkpoint": True, "load_checkpoint_path": str(checkpoint)}
    else:
        if trainer.load_checkpoint:
            raise UserError(
                f"`trainer.load_checkpoint: true`, but {run.directory} has no checkpoint yet. Leave it out: a run"
                " resumes from its newest checkpoint where there is one"
            )
        changes["load_checkpoint"] = False  # None: it would look by itself
        if trainer.initialize_from is not None:
            location = location_of(trainer.initialize_from)
            if not has_checkpoint(location):
                raise UserError(
                    f"`trainer.initialize_from` is {trainer.initialize_from}, which has no checkpoint; give a run's"
                    " folder `checkpoints`, or one `step-N` in it"
                )
            with phase(f"Checking {trainer.initialize_from}"):
                source, damaged = sound_checkpoint(location, damage_found_together)
            for checkpoint in damaged:
                warnings.warn(Notice(f"{checkpoint}. Using {source.name}, the newest good one, instead"), stacklevel=2)
            changes["initialize_from"] = str(source)
    if config.max_skipped_steps:  # the loop itself looks at the loss
        changes |= {"crash_on_nan": False, "crash_on_inf": False}
    checkpointer = dataclasses.replace(
        trainer.checkpointer, base_path=str(checkpoints), append_run_id_to_base_path=False
    )
    # Levanter puts profiles and the like into <log_dir>/<id>.
    return dataclasses.replace(trainer, checkpointer=checkpointer, log_dir=folder.parent, **changes)
