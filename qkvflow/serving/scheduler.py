"""Continuous batching: a thread that moves requests through the slots of an engine, joining and leaving at any token.

Each turn of the loop admits waiting requests to free slots, reads a piece of the oldest unread prompt, and adds a token
to every text whose prompt is read. So a long prompt delays others by a piece at a time, and a short text waits for no
long one.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkvflow.generation.engine import Engine
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation
from qkvflow.generation.writer import Writer

log = logging.getLogger(__name__)


class Overloaded(Exception):
    """More requests are waiting than the server is willing to keep."""


@dataclass(frozen=True)
class Event:
    """News of a text. text: what it has got. reason: why it ended (`stop`, `length`, `error`), None if it goes on."""

    text: str
    reason: str | None
    tokens: int = 0


@dataclass(eq=False)
class Job:
    """One text to make. emit: receives its events, in the scheduler's thread; the last one has a reason."""

    tokens: list[int]
    max_new_tokens: int
    options: SamplingOptions
    stops: Sequence[str]
    control: np.ndarray | None
    emit: Callable[[Event], None]
    cancelled: bool = field(default=False, init=False)


class _Slot:
    def __init__(self, job: Job, text: Continuation, order: int):
        self.job, self.text, self.order = job, text, order
        self.unread = len(job.tokens) - 1


class Scheduler:
    """Serves jobs with `slots` of them at a time.

    length: room for each text, prompt included.
    max_waiting: jobs that may wait for a slot.
    """

    def __init__(self, writer: Writer, slots: int, length: int, max_waiting: int = 256):
        self.writer, self.max_waiting = writer, max_waiting
        self._length = length
        self._engine = self._new_engine(slots)
        self._slots: list[_Slot | None] = [None] * slots
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._admitted = 0
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def warm_up(self) -> None:
        """Compiles every step, so that the first request does not wait for it."""
        for tokens in self._engine.compile_lengths:
            self._engine.admit(0, [0] * tokens, 1, SamplingOptions())
            self._engine.prefill(0, tokens - 1)
        self._engine.decode(1)
        self._engine.cancel(0)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, all or none. Errors: `Overloaded`."""
        with self._changed:
            if self._closing or len(self._waiting) + len(jobs) > self.max_waiting:
                raise Overloaded
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Gives up a job: it gets no more events, and its slot is free at the next turn. Harmless if it has ended."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def load(self) -> dict[str, int]:
        """How many jobs are running and waiting, and how many slots there are."""
        with self._changed:
            running = sum(slot is not None for slot in self._slots)
            return {"slots": len(self._slots), "running": running, "waiting": len(self._waiting)}

    def close(self) -> None:
        """Stops the thread. Jobs that are not finished end with the reason `error`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sweep()
                while not self._closing and not self._waiting and not any(self._slots):
                    self._changed.wait()
                    self._sweep()
                if self._closing:
                    break
                admitted = self._take()
            try:
                self._turn(admitted)
            except Exception:  # whatever it is, other requests must not suffer from it for ever
                log.exception("a step failed; the texts in the slots are given up")
                self._fail_all()
                self._engine = self._new_engine(self._engine.slots)
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
        self._fail_all()
        for job in waiting:
            _emit(job, Event("", "error"))

    def _sweep(self) -> None:
        """Frees what was cancelled."""
        for index, slot in enumerate(self._slots):
            if slot is not None and slot.job.cancelled:
                self._free(index)
        if any(job.cancelled for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def _take(self) -> list[int]:
        """Gives free slots to those who wait longest."""
        admitted = []
        for index, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                job = self._waiting.popleft()
                text = Continuation(self.writer.tokenizer, job.tokens, job.stops, self.writer.stop_tokens)
                self._slots[index] = _Slot(job, text, self._admitted)
                self._admitted += 1
                admitted.append(index)
        return admitted

    def _turn(self, admitted: list[int]) -> None:
        for index in admitted:
            job = self._slots[index].job
            self._engine.admit(index, job.tokens, job.max_new_tokens, job.options, job.control)
        unread = [i for i, slot in enumerate(self._slots) if slot is not None and slot.unread > 0]
        if unread:
            index = min(unread, key=lambda i: self._slots[i].order)
            slot = self._slots[index]
            slot.unread -= self._engine.prefill(index, slot.unread)
        if all(slot is None or slot.unread > 0 for slot in self._slots):
            return
        token, _, complete = self._engine.decode(1)
        for index, slot in enumerate(self._slots):
            if slot is None or slot.unread > 0:
                continue
            text = slot.text.push(int(token[index]), bool(complete[index]))
            if text or slot.text.reason is not None:
                _emit(slot.job, Event(text, slot.text.reason, slot.text.tokens))
            if slot.text.reason is not None:
                with self._changed:
                    self._free(index)

    def _free(self, index: int) -> None:
        self._slots[index] = None
        self._engine.cancel(index)

    def _fail_all(self) -> None:
        with self._changed:
            failed = [slot.job for slot in self._slots if slot is not None]
            self._slots = [None] * len(self._slots)
        for job in failed:
            _emit(job, Event("", "error"))

    def _new_engine(self, slots: int) -> Engine:
        return self.writer.engine(slots, self._length)


def _emit(job: Job, event: Event) -> None:
    if job.cancelled:
        return
    try:
        job.emit(event)
    except RuntimeError:  # the event loop of the receiver is closed
        log.warning("a text came to its end after its receiver")
