"""Assigns slots: requests share the slots equally, regardless of how many texts each has.

A free slot goes to the request that holds the fewest slots, on ties to the one served longest ago. If none is free, a
request that holds at least two fewer than another takes one from it: the text started last there is parked, and is the
first of its request to resume. So a text only waits for texts of other requests if there are more requests than slots.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qkvflow.serving.job import Job, Running


class Request:
    """Texts that were requested together. waiting: those without a slot, the next one first."""

    def __init__(self, jobs: Sequence[Job]):
        self.waiting: deque[Job | Running] = deque(jobs)
        self.running: dict[int, Running] = {}  # by slot
        self.served = self.read = 0  # when it last got a slot, and when a piece of its prompts was last read


class Change(NamedTuple):
    """A slot gets a new text.

    Attributes:
        parked: the text that it replaces.
    """

    slot: int
    request: Request
    text: Job | Running
    parked: Running | None


class Shares:
    """The slots and the requests that share them. slots: their number; as many texts may be parked."""

    def __init__(self, slots: int):
        self.slots = slots
        self.requests: list[Request] = []
        self._turn = 0

    def __iter__(self) -> Iterator[tuple[int, Request, Running]]:
        """All texts in slots."""
        return ((slot, r, text) for r in self.requests for slot, text in list(r.running.items()))

    @property
    def running(self) -> int:
        """Number of texts in slots."""
        return sum(len(request.running) for request in self.requests)

    @property
    def waiting(self) -> int:
        """Number of texts without a slot."""
        return sum(len(request.waiting) for request in self.requests)

    def free(self, slot: int) -> None:
        """Frees a slot whose text has ended."""
        for request in self.requests:
            request.running.pop(slot, None)
        self._forget()

    def cancelled(self) -> list[int]:
        """Drops cancelled texts; returns the slots that they held."""
        if not any(job.cancelled for job in self.jobs()):
            return []
        slots = [slot for slot, _, text in self if text.job.cancelled]
        for slot in slots:
            self.free(slot)
        for request in self.requests:
            request.waiting = deque(text for text in request.waiting if not _job(text).cancelled)
        self._forget()
        return slots

    def jobs(self) -> Iterator[Job]:
        """The jobs of all texts."""
        return (_job(text) for r in self.requests for text in (*r.running.values(), *r.waiting))

    def lost(self) -> list[Job]:
        """The jobs of texts that had to leave their slots and have not reached host memory."""
        left = [text for r in self.requests for text in r.waiting if isinstance(text, Running)]
        return [text.job for text in left if text.text is None or not text.text.is_parked]

    def next(self) -> Change | None:
        """The next slot to assign, if one is free or one request holds too many."""
        wanting = [request for request in self.requests if request.waiting]
        if not wanting:
            return None
        request = min(wanting, key=lambda r: (len(r.running), r.served))
        taken = {slot for slot, _, _ in self}
        slot, parked = next((s for s in range(self.slots) if s not in taken), None), None
        if slot is None:
            richest = max(self.requests, key=lambda r: len(r.running))
            parking = sum(isinstance(text, Running) for r in self.requests for text in r.waiting)
            if len(richest.running) < len(request.running) + 2 or parking >= self.slots:
                return None
            slot = max(richest.running, key=lambda s: richest.running[s].order)
            parked = richest.running.pop(slot)
            richest.waiting.appendleft(parked)
        self._turn += 1
        request.served = self._turn
        return Change(slot, request, request.waiting.popleft(), parked)

    def next_to_read(self) -> tuple[int, Running] | None:
        """The text whose prompt is read next: requests take turns, each with its earliest started text first."""
        unread = [(s, r, t) for s, r, t in self if t.text is not None and t.text.unread > 0]
        if not unread:
            return None
        slot, request, text = min(unread, key=lambda found: (found[1].read, found[2].order))
        self._turn += 1
        request.read = self._turn
        return slot, text

    def _forget(self) -> None:
        self.requests = [request for request in self.requests if request.running or request.waiting]


def _job(text: Job | Running) -> Job:
    return text.job if isinstance(text, Running) else text
