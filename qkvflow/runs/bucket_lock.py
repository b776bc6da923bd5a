"""The lock of a run in a bucket: an object that its owner rewrites every few seconds.

Buckets have no locks that end with their holder. So a lock that changes is held, and one that does not change for a
while was left by a killed process. No clocks are compared. Limitation: a process that was suspended for longer than
others wait only notices this at its next heartbeat; until then two may write.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from qkvflow.errors import UserError
from qkvflow.locks import Taken
from qkvflow.places import Place

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 30.0  # an object that stands still for so long is nobody's


class BucketLock:
    """A lock that is held, see `held`."""

    def __init__(self, place: Place, name: str):
        self._place, self._name, self._token = place, name, secrets.token_hex(8)
        self._taker: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock of the run", daemon=True)

    def check(self) -> None:
        """Looks whether this process still holds the lock.

        Raises:
            UserError: another process has taken the lock, because this one stood still for too long.
        """
        if self._taker is not None:
            raise UserError(
                f"{self._taker} has taken over the run {self._place}, because this process did not respond for more"
                f" than {PATIENCE_SECONDS:.0f} seconds. This process has stopped and writes nothing more"
            )

    def take(self, while_waiting: Callable[[], None]) -> None:
        """Takes the lock if nobody holds it.

        Raises:
            Taken: it is held by another.
        """
        before, takes_over = self._read(), False
        pause = min(1.0, PATIENCE_SECONDS / 10)
        if before is not None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                time.sleep(pause)
                while_waiting()
                now = self._read()
                if now is None:
                    break
                if now != before:
                    raise Taken(_owner(now))
            else:
                takes_over = True
                with contextlib.suppress(FileNotFoundError):
                    self._place.remove(self._name)
        try:
            self._place.create(self._name, self._content())
        except FileExistsError:
            raise Taken(_owner(self._read() or {})) from None
        if takes_over:  # another may have waited as long, and then removed this lock instead of the one that was left
            time.sleep(pause)
            now = self._read() or {}
            if now.get("token") != self._token:
                raise Taken(_owner(now))
        self._thread.start()

    def release(self) -> None:
        """Ends the beat, and removes the object if it is still this process's."""
        self._stop.set()
        self._thread.join()
        try:
            if (self._read() or {}).get("token") == self._token:
                self._place.remove(self._name)
        except Exception as error:  # without a beat, others take it soon
            logger.warning("the lock %s/%s could not be removed: %s", self._place, self._name, error)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                found = self._read() or {}
                if found.get("token") != self._token:
                    self._taker = _owner(found)
                    return
                self._place.write(self._name, self._content())
            except Exception as error:  # the network comes back, or others take the run
                logger.warning("the lock %s/%s could not be renewed: %s", self._place, self._name, error)

    def _content(self) -> bytes:
        record = {
            "token": self._token,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "time": datetime.now().astimezone().isoformat(),
        }
        return json.dumps(record).encode()

    def _read(self) -> dict | None:
        try:
            return dict(json.loads(self._place.read(self._name)))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}


@contextlib.contextmanager
def held(place: Place, name: str, while_waiting: Callable[[], None] = lambda: None) -> Iterator[BucketLock]:
    """Holds the lock object `name` of a place for the length of a `with` block.

    Args:
        while_waiting: called about every second while it looks whether another one lives.

    Raises:
        Taken: another process holds it.
    """
    lock = BucketLock(place, name)
    lock.take(while_waiting)
    try:
        yield lock
    finally:
        lock.release()


def _owner(record: dict) -> str:
    where = f" (number {record['process']} on {record['host']})" if {"process", "host"} <= set(record) else ""
    return f"another process{where}"
