"""Stopping on request: SIGTERM or Ctrl-C lets the current step finish; a second one stops at once."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Notes SIGTERM and SIGINT for the length of a `with` block.

    Of several processes of a run, each may get SIGTERM at another step, or one of them alone. There JAX's
    preemption service notes SIGTERM and finds a step at which all stop; Ctrl-C ends them without a checkpoint.

    signal: the number of the signal that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_status(self) -> int:
        """What shells expect of a process that a signal has ended: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + (self.signal or 0)

    def is_due(self, step: int) -> bool:
        """Whether to stop after this step. All processes of a run must ask after each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if jax.process_count() > 1:
            return self
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
