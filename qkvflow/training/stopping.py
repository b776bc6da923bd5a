"""Stopping on request: SIGTERM or Ctrl-C lets the current step finish; a second one stops immediately."""

import itertools
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from levanter.distributed import DistributedConfig

_questions = itertools.count(1)  # of this process to JAX's preemption service


class StopRequest:
    """Notes SIGTERM and SIGINT for the length of a `with` block.

    Of several processes of a run, each may get SIGTERM at another step, or one of them alone. There JAX's
    preemption service notes SIGTERM, from `meet` on, and finds a question at which it says yes to all; Ctrl-C ends
    them without a checkpoint.

    Attributes:
        signal: the number of the signal that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_status(self) -> int:
        """What shells expect of a process that a signal has ended: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + (self.signal or 0)

    def is_due(self) -> bool:
        """Whether to stop now. All processes of a run must ask equally often: before the first step and after each."""
        # The service knows questions by their number, and says yes to one number only: the largest so far and one.
        # The number of the step would not do: before the first question 1 is next, where a resumed run never comes.
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(next(_questions)):
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


def meet(distributed: DistributedConfig) -> None:
    """Waits until all processes of the run are there, if it has several; SIGTERM ends this one at once meanwhile.

    Python's handlers run between its own instructions, so a process that waits in here would not hear them: half an
    hour, if another one has died.
    """
    if jax.distributed.is_initialized():
        return
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL) if is_main else None
    try:
        distributed.initialize()
    finally:
        if is_main and not jax.distributed.is_initialized():  # else the preemption service has its own handler now
            signal.signal(signal.SIGTERM, before)
