"""One text of a request, and its progress."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkvflow.generation.drafting import Drafted
from qkvflow.generation.engine import Text
from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import Continuation


@dataclass(frozen=True)
class Told:
    """What is reported about a token of a text. logprob: None for the first token of a prompt.

    Attributes:
        top: the most likely tokens there, (token, log-probability), as many as requested.
        offset: where the token begins.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    offset: int = 0


class ToldPrompt:
    """What is reported about each token of a prompt, in arrays until it is read: as objects it takes 15 times the
    memory, and a request may have many texts with long prompts.
    """

    def __init__(self, tokens: Sequence[int], top: int):
        """
        Args:
            top: number of most likely tokens reported per token.
        """
        self._tokens, self._top = tokens, top
        self._pieces: list[Logprobs] = []

    def add(self, piece: Logprobs) -> None:
        """Those of the tokens that follow."""
        likeliest = (a[:, : self._top].copy() for a in (piece.top, piece.top_logprobs))  # not all that there are
        self._pieces.append(Logprobs(piece.token, *likeliest))

    def __iter__(self) -> Iterator[Told]:
        yield Told(self._tokens[0], None)
        places = ((piece, i) for piece in self._pieces for i in range(len(piece.token)))
        for token, (piece, i) in zip(self._tokens[1:], places, strict=False):
            yield _told(token, piece, i, self._top)


@dataclass(frozen=True)
class Event:
    """An update of a text. text: newly added. reason: why it ended (`stop`, `length`, `error`), None if it continues.

    Attributes:
        tokens: number of tokens so far.
        drafted: counts of drafting for the text.
        told: tokens whose text is now reported; prompt tokens have no offsets.
        mean: log-probability per token so far, with those that are not reported, such as of a stop string; 0 if it was
            not requested.
    """

    text: str
    reason: str | None
    tokens: int = 0
    told: Iterable[Told] = ()
    is_prompt: bool = False
    drafted: Drafted | None = None
    mean: float = 0.0


@dataclass(eq=False)
class Job:
    """One text to generate. emit: receives its events, in the scheduler's thread; the last one has a reason.

    Attributes:
        max_new_tokens: may be 0, to only score the prompt.
        top: number of most likely tokens reported per token, if `options.logprobs`.
        prompt_logprobs: whether to report them for the prompt too.
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
    """A job that has started: in a slot, or parked.

    Attributes:
        text: held here while its prompt is read and while it is parked; None while it is in the engine's slot.
        order: of its start.
    """

    def __init__(self, job: Job, continuation: Continuation, order: int):
        self.job, self.order = job, order
        self.text: Text | None = None
        self._continuation = continuation
        self._held: deque[Told] = deque()
        self._prompt = ToldPrompt(job.tokens, job.top)
        self._total = 0.0  # log-probability of all added tokens

    def read(self, logprobs: Logprobs | None) -> None:
        """Records the log-probabilities of a piece of the prompt."""
        if logprobs is not None:
            self._prompt.add(logprobs)

    def begin(self) -> Event | None:
        """The event to emit when the prompt is read."""
        reason = "length" if self.job.max_new_tokens == 0 else None
        if self.job.prompt_logprobs:
            return Event("", reason, 0, self._prompt, is_prompt=True)
        return Event("", reason, 0, is_prompt=True) if reason else None

    def add(
        self,
        token: int,
        complete: bool,
        logprobs: Logprobs | None,
        place: tuple[int, int],
        drafted: Drafted | None = None,
    ) -> Event | None:
        """The event to emit for an added token.

        Args:
            place: its index in `logprobs`.
        """
        text, before = self._continuation, self._continuation.made
        shown = text.push(token, complete)
        if self.job.options.logprobs:
            assert logprobs is not None
            offset = text.offset_of(token, before)
            self._held.append(_told(token, logprobs, place, self.job.top, offset))
            self._total += float(logprobs.token[place])
        told = []
        # Tokens of a stop string are not reported; tokens without text after the last character are.
        end = text.shown if text.reason is None or text.shown < text.made else text.made + 1
        while self._held and self._held[0].offset < end:
            told.append(self._held.popleft())
        mean = self._total / max(1, text.tokens)
        event = Event(shown, text.reason, text.tokens, told, drafted=drafted, mean=mean)
        return event if shown or told or text.reason else None


def _told(token: int, logprobs: Logprobs, at: int | tuple[int, int], top: int, offset: int = 0) -> Told:
    likeliest = zip(logprobs.top[at][:top].tolist(), logprobs.top_logprobs[at][:top].tolist(), strict=True)
    return Told(int(token), float(logprobs.token[at]), tuple(likeliest), offset)
