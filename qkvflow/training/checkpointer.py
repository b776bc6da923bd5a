"""Levanter's checkpointer with checksums, a monotonic clock, and a save before stopping."""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from levanter.checkpoint import CheckpointerConfig, CheckpointInterval

from qkvflow.inside.levanter import StoppableCheckpointer, set_manager
from qkvflow.runs.checkpoints import remove_checkpoint
from qkvflow.runs.checksum_manager import ChecksumManager

logger = logging.getLogger(__name__)
_BEGINNING = datetime(2000, 1, 1)  # any: only differences of times count
_TIMEOUT_SECONDS = 30 * 60  # as in Levanter


class RunCheckpointer(StoppableCheckpointer):
    """Saves checkpoints of a run as they fall due, and one more when it is stopped.

    Attributes:
        before_saving: called before anything of a checkpoint is written.
    """

    before_saving: Callable[[], None] = staticmethod(lambda: None)

    def save_checkpoint(self, tree: Any, step: int, destination: str, *args: Any, **options: Any) -> None:
        """
        Args:
            tree: what is saved, or a function that gives it, which is called only if something is saved.
        """
        self.before_saving()
        super().save_checkpoint(tree() if callable(tree) else tree, step, destination, *args, **options)

    def remove(self, checkpoint: str) -> None:
        """Removes an old checkpoint; a failure is logged, since training can go on."""
        try:
            remove_checkpoint(checkpoint)
        except (
            Exception
        ):  # stores have errors of their own; unhandled, Levanter's thread would end, and waiting for it never
            logger.exception("the old checkpoint %s could not be removed", checkpoint)


def create_checkpointer(config: CheckpointerConfig, clock: Callable[[], float] = time.monotonic) -> RunCheckpointer:
    """What `config.create` makes, for checkpoints in `config.base_path`.

    Differs from Levanter, which measures `save_interval` by the clock on the wall: set back, it would stop saving.

    Args:
        clock: seconds since any beginning.
    """
    checkpointer = RunCheckpointer(
        config.base_path,
        config.save_interval,
        [CheckpointInterval(**interval) for interval in config.keep or []],
        dt_now_injection=lambda: _BEGINNING + timedelta(seconds=clock()),
        delete_old_temp_checkpoints=config.delete_old_temp_checkpoints,
        keep_last_temporary_checkpoints=config.keep_last_temporary_checkpoints,
        debug=config.debug,
    )
    set_manager(checkpointer, ChecksumManager(timeout_secs=_TIMEOUT_SECONDS))
    return checkpointer
