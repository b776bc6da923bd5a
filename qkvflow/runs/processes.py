"""Several processes of one run: the first one opens the run directory, the others follow or exit with it."""

import socket
import time
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from qkvflow.checksums import Checksum, damage_of, first_changed
from qkvflow.errors import UserError, first_line
from qkvflow.places import Place
from qkvflow.runs.mirror import LOCK

_SECONDS_TO_APPEAR = 30  # what network file systems may need to show a new file to another machine
_OPEN, _REFUSED, _WAIT = (
    -1,
    -2,
    -3,
)  # what the first process tells; other numbers are steps whose checkpoints all check together


def tell_others(place: Place | None) -> None:
    """The first process tells whether the run directory is open; returns when all have heard it.

    Args:
        place: the run directory, whose lock all processes must see; None if it could not be opened.

    Raises:
        UserError: another process does not see the directory.
    """
    if jax.process_count() == 1:
        return
    multihost_utils.broadcast_one_to_all(np.int32(_REFUSED if place is None else _OPEN))
    if place is None:
        jax.distributed.shutdown()  # returns when all have come to it; else the others would be aborted
    else:
        _require_seen(place)


def follow(place: Place) -> None:
    """Another process waits for the first one, and reads its share of what that one checks.

    Raises:
        UserError: the first one could not open the directory, or it is not to be seen from here.
    """
    while (told := int(multihost_utils.broadcast_one_to_all(np.int32(0)))) not in (_OPEN, _REFUSED):
        if told != _WAIT:
            damage_found_together(place / "checkpoints" / f"step-{told}")
    if told == _REFUSED:
        jax.distributed.shutdown()
        raise UserError("the first process of this run could not open the run directory; see its error")
    _require_seen(place)


def let_others_wait() -> None:
    """Called again and again by the first process while it waits: collectives on CPUs give up after half a minute."""
    if jax.process_count() > 1:
        multihost_utils.broadcast_one_to_all(np.int32(_WAIT))


def damage_found_with_followers(checkpoint: Place) -> str | None:
    """`damage_found_together`, for the first process while the others `follow`."""
    if jax.process_count() > 1:
        multihost_utils.broadcast_one_to_all(np.int32(checkpoint.name.removeprefix("step-")))
    return damage_found_together(checkpoint)


def damage_found_together(checkpoint: Place) -> str | None:
    """What `damage_of` finds, if each process of the run reads its share of the files; all must call it alike."""
    index, count = jax.process_index(), jax.process_count()

    def changed_in_share(place: Place, expected: dict[str, Checksum]) -> str | None:
        sizes = {name: checksum.bytes for name, checksum in expected.items()}
        return first_changed(place, {name: expected[name] for name in shares(sizes, count)[index]})

    found = damage_of(checkpoint, changed_in_share)
    if count == 1 or not multihost_utils.process_allgather(np.asarray(found is not None)).any():
        return found
    if index == 0:  # speaks for all
        found = found or damage_of(checkpoint)
    return found or "another process has found it damaged"


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The names in `count` parts of nearly equal size: each, the largest first, goes to the smallest part so far."""
    parts, totals = [list[str]() for _ in range(count)], [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        parts[smallest].append(name)
        totals[smallest] += sizes[name]
    return parts


def _require_seen(place: Place) -> None:
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while (reason := _not_seen(place)) and time.monotonic() < deadline:
        time.sleep(0.2)
    sees = multihost_utils.process_allgather(np.asarray(not reason)).reshape(-1)
    if sees.all():
        return
    blind = [int(i) for i in np.flatnonzero(~sees)]
    jax.distributed.shutdown()
    if place.is_remote:
        why = f"{reason}. " if reason else ""
        remedy = f"{why}All machines need the same bucket and credentials with permission to read and write it"
    else:
        remedy = (
            "All machines must share one folder, through NFS or Lustre, or a bucket (gs://, s3://): set it with"
            " --run_dir DIR"
        )
    raise UserError(
        f"the run directory {place} is not shared: processes {blind} of {jax.process_count()} do not see what"
        f" the first one wrote there (this is {socket.gethostname()}). {remedy}"
    )


def _not_seen(place: Place) -> str:
    """Why this process does not see the lock of the run; empty if it does."""
    try:
        place.names()  # makes NFS look again
        return "" if place.has(LOCK) else "its lock is missing"
    except Exception as error:  # of any store
        return first_line(error)
