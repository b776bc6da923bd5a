"""Requests share the slots equally, however many texts each of them wants."""

import random

import pytest

from qkvflow.generation.sampling import SamplingOptions
from qkvflow.serving.job import Job, Running
from qkvflow.serving.shares import Request, Shares


def request(texts):
    return Request([Job([1], 1, SamplingOptions(), (), None, emit=lambda event: None) for _ in range(texts)])


class Slots:
    """Shares as the scheduler uses them, without an engine."""

    def __init__(self, slots):
        self.shares, self.started = Shares(slots), 0

    def add(self, texts):
        self.shares.requests.append(request(texts))
        return self.shares.requests[-1]

    def settle(self):
        """Gives slots away until nobody gets another; the changes."""
        changes = []
        while (change := self.shares.next()) is not None:
            text = change.text
            if isinstance(text, Job):
                text = Running(text, None, self.started)
                self.started += 1
            change.request.running[change.slot] = text
            changes.append(change)
            assert len(changes) < 1000, "slots change hands for ever"
        return changes


def test_a_short_request_gets_a_slot_at_once():
    """A request with 128 texts holds all slots: one with a single text takes one of them, and gives it back."""
    slots = Slots(8)
    large = slots.add(128)
    slots.settle()
    assert len(large.running) == 8
    newest = max(large.running.values(), key=lambda text: text.order)
    small = slots.add(1)
    (change,) = slots.settle()
    assert change.parked is newest, "the one that has lost least"
    assert (len(small.running), len(large.running)) == (1, 7)
    slots.shares.free(change.slot)
    (change,) = slots.settle()
    assert change.text is newest, "what was parked goes on first"


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_equal(seed):
    """Whatever comes and goes: no slot is idle while a text waits, and who waits has at most one fewer than another."""
    draw, slots = random.Random(seed), Slots(8)
    for _ in range(400):
        if draw.random() < 0.4:
            slots.add(draw.choice((1, 1, 2, 5, 40)))
        taken = [slot for slot, _, _ in slots.shares]
        if taken and draw.random() < 0.7:
            slots.shares.free(draw.choice(taken))
        if draw.random() < 0.1:
            for job in draw.choice([r for r in slots.shares.requests] or [request(1)]).waiting:
                (job.job if isinstance(job, Running) else job).cancelled = True
            slots.shares.cancelled()
        slots.settle()
        requests, held = slots.shares.requests, [len(r.running) for r in slots.shares.requests]
        assert sum(held) == min(8, slots.shares.running + slots.shares.waiting)
        assert sum(isinstance(t, Running) for r in requests for t in r.waiting) <= 8, "parked texts cost memory"
        parked = sum(isinstance(t, Running) for r in requests for t in r.waiting)
        for r in requests:
            assert not r.waiting or parked == 8 or len(r.running) >= max(held) - 1
        running = [text for _, _, text in slots.shares]
        assert len(set(map(id, running))) == len(running)


def test_requests_take_turns():
    """More requests than slots: each gets one in the order in which it came, none again before all."""
    slots = Slots(2)
    requests = [slots.add(3) for _ in range(4)]
    slots.settle()
    order = [r for r in requests for _ in r.running]
    for _ in range(6):
        oldest = min(slots.shares, key=lambda found: found[2].order)
        slots.shares.free(oldest[0])
        order += [change.request for change in slots.settle()]
    assert order == [*requests, *requests]
