"""Stopping on request: SIGTERM or Ctrl-C lets the current step finish; a second one stops at once."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Notes SIGTERM and SIGINT for the length of a `with` block.

    signal: the number of the signal that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_status(self) -> int:
        """What shells expect of a process that a signal has ended: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + (self.signal or 0)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal = number
