"""Levanter's checkpointer with checksums, a clock that only runs forwards, and a way to save before stopping."""

import logging
import os
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import jax
from levanter.checkpoint import Checkpointer, CheckpointerConfig, CheckpointInterval

from qkvflow.runs.checkpoints import remove_checkpoint
from qkvflow.runs.checksums import ChecksumManager

logger = logging.getLogger(__name__)
_BEGINNING = datetime(2000, 1, 1)  # any: only differences of times count
_TIMEOUT_SECONDS = 30 * 60  # as in Levanter


class RunCheckpointer(Checkpointer):
    """Saves checkpoints of a run as they fall due, and one more when it is stopped."""

    def save_to_continue(self, tree: Any, step: int) -> None:
        """Saves what the next start continues from, as a temporary checkpoint: it replaces those before it.

        Differs from `save_checkpoint`, which leaves them: a run that is stopped often would fill its disk.
        """
        name = f"step-{step}"

        def replace() -> None:
            if jax.process_index() == 0:
                self._record_temporary_checkpoint(os.path.join(self.base_path, name))
                self._prune_temporary_checkpoints(self.keep_last_temporary_checkpoints)

        self.save_checkpoint(tree, step, name, replace, is_temporary=True)

    def _do_rm_checkpoint(self, cp_path: str) -> None:
        """Differs from Levanter, which takes `[`, `*` and `?` of a path for patterns, and which may leave a checkpoint
        that looks complete when it is killed in between."""
        try:
            remove_checkpoint(cp_path)
        except OSError:
            logger.exception("the old checkpoint %s could not be removed", cp_path)


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
    checkpointer._manager = ChecksumManager(timeout_secs=_TIMEOUT_SECONDS)
    return checkpointer
