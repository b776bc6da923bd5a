"""Several processes of one run: the first one opens the run directory, the others follow or end with it."""

import os
import socket
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from qkvflow.errors import UserError

_SECONDS_TO_APPEAR = 30  # what network file systems may need to show a new file to another machine


def tell_others(mark: Path | None) -> None:
    """The first process tells whether the run directory is open; returns when all have heard it.

    Args:
        mark: a file in the run directory, which all processes must see; None if it could not be opened.

    Errors: `UserError` if another process does not see the directory.
    """
    if jax.process_count() == 1:
        return
    multihost_utils.broadcast_one_to_all(np.asarray(mark is not None))
    if mark is None:
        jax.distributed.shutdown()  # returns when all have come to it; else the others would be aborted
    else:
        _require_seen(mark)


def follow(mark: Path) -> None:
    """Another process waits for the first one.

    Errors: `UserError` if the first one could not open the directory, or if it is not to be seen from here.
    """
    if not multihost_utils.broadcast_one_to_all(np.asarray(False)):
        jax.distributed.shutdown()
        raise UserError("the first process of this run could not open the run directory, and says why")
    _require_seen(mark)


def _require_seen(mark: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while not mark.exists() and time.monotonic() < deadline:
        os.listdir(mark.parent) if mark.parent.is_dir() else None  # makes NFS look again
        time.sleep(0.2)
    sees = multihost_utils.process_allgather(np.asarray(mark.exists())).reshape(-1)
    if sees.all():
        return
    blind = [int(i) for i in np.flatnonzero(~sees)]
    jax.distributed.shutdown()
    raise UserError(
        f"the run directory {mark.parent} is not shared: processes {blind} of {jax.process_count()} do not see what"
        f" the first one wrote there (this is {socket.gethostname()}). All machines must see one folder, by NFS,"
        " Lustre or a mounted bucket: give it with --run_dir DIR"
    )
