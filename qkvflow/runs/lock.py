"""One process per run directory: a lock that the kernel releases when its holder ends, however it ends."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from qkvflow.errors import UserError

logger = logging.getLogger(__name__)

_held: set[Path] = set()  # a process can take its own POSIX lock twice, so it remembers


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path` for the length of a `with` block.

    Errors: `UserError` if another process, or another run in this one, holds it.
    """
    path = path.resolve()
    if path in _held:
        raise UserError(f"this process is already training in {path.parent}")
    # A POSIX lock, not flock: children that a library forks must not keep it alive after their parent.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            number = f" (number {owner})" if owner else ""
            raise UserError(
                f"another process{number} is training in {path.parent}. Wait for it, stop it, or give this "
                "run a name of its own with --trainer.id NAME"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning("%s has no file locks: do not start a run twice at once", path.parent)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
    finally:
        os.close(descriptor)
