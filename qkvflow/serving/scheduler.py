"""Continuous batching: a thread that moves texts through the slots of an engine; they may join and leave at any token.

Each iteration of the loop assigns a slot to a waiting text, reads a piece of a prompt, and adds a token to every text
whose prompt is read. So a long prompt delays others by one piece at a time, a short text does not wait for a long one,
and no one waits for many texts that begin together.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qkvflow.generation.drafting import Drafted
from qkvflow.generation.engine import Engine
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation
from qkvflow.generation.writer import Writer
from qkvflow.serving.job import Event, Job, Running
from qkvflow.serving.shares import Request, Shares

log = logging.getLogger(__name__)


class Overloaded(Exception):
    """More texts are waiting than the server accepts."""


class TooMany(Exception):
    """More texts than the server could ever hold."""


class Broken(Exception):
    """A step failed, and no new engine could be made."""


class Scheduler:
    """Serves up to `slots` jobs at a time.

    length: room for each text, including its prompt.

    Attributes:
        max_waiting: jobs that may wait for a slot.
        is_broken: after a failed step no new engine could be made, so nothing is generated any more.
    """

    def __init__(self, writer: Writer, slots: int, length: int, max_waiting: int = 256):
        self.writer, self.max_waiting = writer, max_waiting
        self._length = length
        self._engine = self._new_engine(slots)
        self._shares = Shares(slots)
        self._changed = threading.Condition()
        self._closing = self.is_broken = False
        self._started = 0
        self._drafted = Drafted()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def capacity(self) -> int:
        """Maximum number of texts in slots and waiting."""
        return self._shares.slots + self.max_waiting

    def warm_up(self) -> None:
        """Compiles every step, so that no request waits for it."""
        engine, options = self._engine, SamplingOptions()
        text = None
        for tokens in engine.compile_lengths:
            text = engine.begin([0] * tokens, 1, options)
            while text.unread:
                engine.prefill(text, [0] * text.unread)
        assert text is not None
        sizes = set()
        for slot in range(engine.slots):
            engine.insert(slot, text)
            if engine.rows not in sizes:
                sizes.add(engine.rows)
                parked = engine.take(slot)
                parked.park()
                engine.insert(slot, parked)
                engine.decode(1)
        for slot in range(engine.slots):
            engine.cancel(slot)
        while engine.rows > min(sizes):
            engine.decode(1)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accepts the jobs of one request, all or none.

        Raises:
            Overloaded: there is no room now.
            TooMany: there could never be room.
            Broken: nothing is generated any more.
        """
        if len(jobs) > self.capacity:
            raise TooMany
        with self._changed:
            if self.is_broken:
                raise Broken
            if self._closing or self._shares.running + self._shares.waiting + len(jobs) > self.capacity:
                raise Overloaded
            self._shares.requests.append(Request(jobs))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Cancels a job: it gets no more events, and its slot is free at the next turn. Harmless if it has ended."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def load(self) -> dict[str, Any]:
        """Numbers of running jobs, waiting jobs and slots, and the counts of drafting for all texts so far."""
        with self._changed:
            load = {"slots": self._shares.slots, "running": self._shares.running, "waiting": self._shares.waiting}
            return {**load, "drafting": asdict(self._drafted)} if self.writer.prepared.draft_tokens else load

    def close(self) -> None:
        """Stops the thread. Unfinished jobs end with the reason `error`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                freed = self._shares.cancelled()
                while not self._closing and not self._shares.requests:
                    self._changed.wait()
                    freed += self._shares.cancelled()
                if self._closing:
                    break
            if not self._try_turn(freed) and not self._restart():
                break
        with self._changed:
            jobs = list(self._shares.jobs())
        self._fail(jobs)

    def _try_turn(self, freed: Sequence[int]) -> bool:
        """A turn of the loop, after the texts in `freed` slots have been cancelled; False if it fails."""
        try:
            for slot in freed:
                self._engine.cancel(slot)
            self._turn()
        except Exception:  # whatever it is, other requests must not be blocked by it
            log.exception("a step failed; the texts in the slots end with an error")
            return False
        return True

    def _restart(self) -> bool:
        """Ends the texts in the slots, and one that was leaving its slot, with an error, and makes a new engine; False
        if none can be made."""
        with self._changed:
            running = {slot: text.job for slot, _, text in self._shares}
            # If no text has a slot, one of those that wait is at fault.
            jobs = [*running.values(), *self._shares.lost()] or list(self._shares.jobs())
            for slot in running:
                self._shares.free(slot)
        self._fail(jobs)
        slots = self._engine.slots
        del self._engine  # there may be no memory for two
        try:
            self._engine = self._new_engine(slots)
        except Exception:
            log.exception("no new engine can be made: the server generates no more texts, restart it")
            with self._changed:
                self.is_broken = True
            return False
        return True

    def _turn(self) -> None:
        self._change_hands()
        unread = self._shares.next_to_read()
        if unread is not None:
            self._read(*unread)
        going = [(slot, text) for slot, _, text in self._shares if text.text is None]
        if not going:
            return
        step = self._engine.decode(1)
        for slot, text in going:
            drafted = step.drafted[slot] if step.drafted else None
            for token, complete, place in step.added(slot):
                if self._tell(slot, text, text.add(token, complete, step.logprobs, place, drafted)):
                    break

    def _change_hands(self) -> None:
        """Assigns a slot to a waiting text, if one is available."""
        with self._changed:
            change = self._shares.next()
            if change is None:
                return
            entering = change.text
            if isinstance(entering, Job):
                vocabulary, ends = self.writer.vocabulary, self.writer.stop_tokens
                continuation = Continuation(vocabulary, entering.tokens, entering.stops, ends)
                entering = Running(entering, continuation, self._started)
                self._started += 1
            change.request.running[change.slot] = entering
        if change.parked is not None:
            self._park(change.slot, change.parked)
        self._enter(change.slot, entering)

    def _park(self, slot: int, parked: Running) -> None:
        """Moves a text out of a slot to host memory."""
        parked.text = self._engine.take(slot) if parked.text is None else parked.text
        parked.text.park()

    def _enter(self, slot: int, entering: Running) -> None:
        job = entering.job
        if entering.text is None:
            entering.text = self._engine.begin(job.tokens, job.max_new_tokens, job.options, job.control)
            self._go_on(slot, entering)
        elif entering.text.unread == 0:
            self._insert(slot, entering)

    def _read(self, slot: int, reading: Running) -> None:
        text, job = reading.text, reading.job
        assert text is not None
        unread = job.tokens[len(job.tokens) - text.unread :] if job.prompt_logprobs else None
        reading.read(self._engine.prefill(text, unread))
        self._go_on(slot, reading)

    def _go_on(self, slot: int, running: Running) -> None:
        """Adds a text to the decoding batch if its prompt is read."""
        assert running.text is not None
        if running.text.unread == 0 and not self._tell(slot, running, running.begin()):
            self._insert(slot, running)

    def _insert(self, slot: int, running: Running) -> None:
        assert running.text is not None
        self._engine.insert(slot, running.text, running.job.options.logprobs)
        running.text = None

    def _tell(self, slot: int, running: Running, event: Event | None) -> bool:
        """Emits an event; a text that has ended leaves its slot. Returns whether it has ended."""
        if event is None:
            return False
        ended = event.reason is not None
        if ended:
            with self._changed:
                self._shares.free(slot)
                self._drafted += event.drafted or Drafted()
        _emit(running.job, event)
        if ended:
            self._engine.cancel(slot)
        return ended

    def _fail(self, jobs: Sequence[Job]) -> None:
        """Ends these jobs with an error; those that wait lose their places."""
        for job in jobs:
            _emit(job, Event("", "error"))
            job.cancelled = True
        with self._changed:
            self._shares.cancelled()

    def _new_engine(self, slots: int) -> Engine:
        return self.writer.engine(slots, self._length, elastic=True)


def _emit(job: Job, event: Event) -> None:
    if job.cancelled:
        return
    try:
        job.emit(event)
    except RuntimeError:  # the receiver's event loop is closed
        log.warning("a text ended after its receiver")
