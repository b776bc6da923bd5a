"""One process at a time: a lock that the kernel releases when its holder ends for any reason.

Children that Python forks do not keep it (filelock closes it in them), nor do programs that are started.
"""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_SECONDS_BETWEEN_LOOKS = 0.2


class Taken(Exception):
    """Another holds the lock. owner: in words, such as `another process (number 123)`."""

    def __init__(self, owner: str):
        super().__init__(owner)
        self.owner = owner


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds the lock file `path` for the length of a `with` block; its folder must exist. The file stays.

    A file system without locks, as on some networks, is reported in the log, and nothing is held.

    Args:
        wait: until another holder has gone.

    Raises:
        Taken: another process, or another place in this one, holds it, and `wait` is false.
        OSError: the file cannot be written.
    """
    lock = FileLock(
        path, -1 if wait else 0, thread_local=False, poll_interval=_SECONDS_BETWEEN_LOOKS, fallback_to_soft=False
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
            path.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")
        except Timeout:
            raise Taken(_owner(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s has no file locks: do not start the same command twice at once", path.parent)
        yield


def _owner(path: Path) -> str:
    try:
        number, _, host = path.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    except OSError:
        return "another process"
    if host == socket.gethostname() and number == str(os.getpid()):
        return "this process"
    where = f" on {host}" if host not in ("", socket.gethostname()) else ""
    return f"another process (number {number}{where})" if number else "another process"
