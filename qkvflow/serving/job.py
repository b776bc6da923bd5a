"""One text of a request, and its progress."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkvflow.generation.drafting import Drafted
from qkvflow.generation.engine import Text
from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation


@dataclass(frozen=True)
class Told:
    """What is told of a token that stands in a text. logprob: None for the first token of a prompt.

    Attributes:
        top: the likeliest tokens there, (token, log-probability), as many as are wanted. offset: where it begins.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    offset: int = 0


@dataclass(frozen=True)
class Event:
    """News of a text. text: what it has got. reason: why it ended (`stop`, `length`, `error`), None if it goes on.

    Attributes:
        tokens: how many it has got so far. drafted: what drafting came to for it.
        told: of those whose text is now told; of a prompt, without offsets.
    """

    text: str
    reason: str | None
    tokens: int = 0
    told: Sequence[Told] = ()
    is_prompt: bool = False
    drafted: Drafted | None = None


@dataclass(eq=False)
class Job:
    """One text to make. emit: receives its events, in the scheduler's thread; the last one has a reason.

    Attributes:
        max_new_tokens: may be 0, if only the prompt is to be judged.
        top: how many of the likeliest tokens are told beside each token, if `options.logprobs`.
        prompt_logprobs: whether those of the prompt are told too.
    """

    tokens: list[int]
    max_new_tokens: int
    options: SamplingOptions
    stops: Sequence[str]
    control: np.ndarray | None
    emit: Callable[[Event], None]
    top: int = 0
    prompt_logprobs: bool = False
    cancelled: bool = field(default=False, init=False)


class Running:
    """A job that was given a slot: in it, or parked.

    Attributes:
        text: on its own, while its prompt is read and while it is parked; None while the engine's slot holds it.
        order: of its start.
    """

    def __init__(self, job: Job, continuation: Continuation, order: int):
        self.job, self.order = job, order
        self.text: Text | None = None
        self._continuation = continuation
        self._held: deque[Told] = deque()
        self._prompt = [Told(job.tokens[0], None)]

    def read(self, logprobs: Logprobs | None) -> None:
        """More of the prompt was read."""
        if logprobs is not None:
            count, top = len(logprobs.token), self.job.top
            tokens = self.job.tokens[len(self._prompt) :][:count]
            self._prompt += [_told(tokens[i], logprobs, i, top) for i in range(count)]

    def begin(self) -> Event | None:
        """What there is to tell when the prompt is read."""
        reason = "length" if self.job.max_new_tokens == 0 else None
        told = self._prompt if self.job.prompt_logprobs else ()
        return Event("", reason, 0, told, is_prompt=True) if told or reason else None

    def add(
        self,
        token: int,
        complete: bool,
        logprobs: Logprobs | None,
        place: tuple[int, int],
        drafted: Drafted | None = None,
    ) -> Event | None:
        """A token was added; what there is to tell of it. place: its own in `logprobs`."""
        text, before = self._continuation, self._continuation.made
        shown = text.push(token, complete)
        if self.job.options.logprobs:
            assert logprobs is not None
            offset = text.offset_of(token, before)
            self._held.append(_told(token, logprobs, place, self.job.top, offset))
        told = []
        # What belongs to a stop string is not told; a token without text behind the last character is.
        end = text.shown if text.reason is None or text.shown < text.made else text.made + 1
        while self._held and self._held[0].offset < end:
            told.append(self._held.popleft())
        event = Event(shown, text.reason, text.tokens, told, drafted=drafted)
        return event if shown or told or text.reason else None


def _told(token: int, logprobs: Logprobs, at: int | tuple[int, int], top: int, offset: int = 0) -> Told:
    likeliest = zip(logprobs.top[at][:top].tolist(), logprobs.top_logprobs[at][:top].tolist(), strict=True)
    return Told(int(token), float(logprobs.token[at]), tuple(likeliest), offset)
