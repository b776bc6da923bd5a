"""The texts of one request during generation: their jobs, their progress, and the responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from types import ModuleType
from typing import Any

from qkvflow.generation.drafting import Drafted
from qkvflow.generation.text import TextStream
from qkvflow.serving.errors import RequestError
from qkvflow.serving.job import Event, Job, Told
from qkvflow.serving.order import Order, Prompt
from qkvflow.serving.scheduler import Broken, Overloaded, Scheduler, TooMany


class Texts:
    """The texts that a request asks for; text i continues prompt i // best_of.

    form: the module for the kind of request, `completions` or `chat`, which formats responses.
    head: the fields with which all responses begin.
    """

    def __init__(self, scheduler: Scheduler, order: Order, form: ModuleType, head: dict[str, Any], deadline: float):
        self._scheduler, self._order, self._form, self._head = scheduler, order, form, head
        self._deadline, self._loop = deadline, asyncio.get_running_loop()
        self._vocabulary = scheduler.writer.vocabulary
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tokens = 0
        self._drafted: dict[int, Drafted] = {}
        self._jobs = [self._job(i, options) for i, options in enumerate(order.options())]

    def submit(self) -> None:
        """Submits the jobs.

        Raises:
            RequestError: the server cannot accept them.
        """
        jobs = [job for job in self._jobs if job.max_new_tokens > 0 or job.prompt_logprobs]
        try:
            if jobs:
                self._scheduler.submit(jobs)
        except TooMany:
            message = f"{len(jobs)} texts are requested; this server can hold {self._scheduler.capacity}."
            raise RequestError(400, message, param="n" if self._order.n > 1 else "prompt") from None
        except Overloaded:
            message = "Too many requests are waiting. Try again in a moment."
            raise RequestError(503, message, code="overloaded") from None
        except Broken:
            message = "This server generates no more texts after a failure, which its log tells. Restart it."
            raise RequestError(503, message, code="broken") from None
        for i, job in enumerate(self._jobs):
            if job not in jobs:
                self._news.put_nowait((i, Event("", "length")))

    def cancel(self) -> None:
        """Cancels unfinished texts."""
        for job in self._jobs:
            self._scheduler.cancel(job)

    async def whole(self) -> list[bytes]:
        """The response as JSON, in parts that are each quick to produce."""
        made: list[_Made] = [_Made() for _ in self._jobs]
        async for index, event in self._events():
            made[index].add(event)
        return await asyncio.to_thread(self._answer, made)

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events."""
        offsets: dict[int, int] = {}  # of the generated parts of the texts that have begun
        try:
            async for index, event in self._events():
                if index in offsets:
                    pieces = self._pieces(index, event, event.text, _moved(event.told, offsets[index]), False)
                elif self._order.echo:  # long, with the log-probabilities of a prompt
                    pieces, offsets[index] = await asyncio.to_thread(self._first, index, event)
                else:
                    pieces, offsets[index] = self._pieces(index, event, event.text, list(event.told), True), 0
                for piece in pieces:
                    yield piece
            if self._order.with_usage:
                yield self._sent({"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:  # the status has already been sent
            yield f"data: {json.dumps(error.body)}\n\n"

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """All events of all texts until the last one has ended.

        Raises:
            RequestError: 504 at the deadline.
        """
        left, made = len(self._jobs), [0] * len(self._jobs)
        while left:
            try:
                async with asyncio.timeout_at(self._deadline):
                    index, event = await self._news.get()
            except TimeoutError:
                raise RequestError(504, "The request took longer than the server allows.", code="timeout") from None
            if event.reason == "error":
                raise RequestError(500, "The server failed or was stopped while it generated this text.")
            left -= event.reason is not None
            made[index] = event.tokens
            self._tokens = sum(made)
            if event.drafted is not None:
                self._drafted[index] = event.drafted
            yield index, event

    def _job(self, index: int, options) -> Job:
        order, prompt = self._order, self._prompt(index)

        def receive(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, event))

        return Job(
            prompt.tokens,
            order.new_tokens[index // order.best_of],
            options,
            order.values.get("stop", []),
            order.common.control,
            receive,
            top=order.top or 0,
            prompt_logprobs=order.echo and order.top is not None,
        )

    def _prompt(self, index: int) -> Prompt:
        return self._order.prompts[index // self._order.best_of]

    def _first(self, index: int, event: Event) -> tuple[list[str], int]:
        """The first event of a text with its prompt prepended, as it is sent, and where the generated part begins."""
        text, told = self._echoed(index, event)
        offset = len(text) - len(event.text)
        return self._pieces(index, event, text, told if event.is_prompt else _moved(told, offset), True), offset

    def _pieces(self, index: int, event: Event, text: str, told: Sequence[Told], is_first: bool) -> list[str]:
        """An event as it is sent, with another text and other offsets."""
        logprobs = self._form.logprobs(told, self._vocabulary) if told and self._order.top is not None else None
        tail = {"usage": None} if self._order.with_usage else {}
        choices = self._form.pieces(index, text, event.reason, logprobs, is_first)
        return [self._sent({"choices": [choice], **tail}) for choice in choices]

    def _echoed(self, index: int, event: Event) -> tuple[str, list[Told]]:
        """The first event of a text with its prompt prepended."""
        prompt = self._prompt(index)
        text, told = prompt.text, list(event.told)
        if text is None:
            text = self._vocabulary.decode(prompt.tokens)
            if self._jobs[index].max_new_tokens > 0:  # the prompt may end within a character
                text = text[: len(text) - TextStream(self._vocabulary, prompt.tokens).held]
        if event.is_prompt:
            begin = self._vocabulary.tokenizer
            added = prompt.text is not None and not prompt.text.startswith(begin.bos_token or "\0")
            told = _placed(told, TextStream(self._vocabulary), begin.bos_token_id if added else None)
        return text + event.text, told

    def _answer(self, made: "list[_Made]") -> list[bytes]:
        order, choices = self._order, []
        for first in range(0, len(made), order.best_of):
            texts = range(first, first + order.best_of)
            if order.best_of > order.n:
                texts = sorted(texts, key=lambda i: -made[i].mean)[: order.n]
            choices += [self._choice(len(choices) + i, index, made[index]) for i, index in enumerate(texts)]
        rest = json.dumps({**self._head, "usage": self._usage()})
        return [rest[:-1].encode(), b', "choices": [', b", ".join(choices), b"]}"]

    def _choice(self, number: int, index: int, made: "_Made") -> bytes:
        text, told = made.text, made.told
        if self._order.echo:
            prompt, told_of_prompt = self._echoed(index, Event("", None, 0, made.prompt, is_prompt=True))
            text, told = prompt + text, told_of_prompt + _moved(told, len(prompt))
        logprobs = None if self._order.top is None else self._form.logprobs(told, self._vocabulary)
        return json.dumps(self._form.whole(number, text, made.reason, logprobs)).encode()

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt.tokens) for prompt in self._order.prompts)
        usage = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}
        if not self._drafted:
            return usage
        drafted = sum(self._drafted.values(), Drafted())
        details = {
            "accepted_prediction_tokens": drafted.accepted,
            "rejected_prediction_tokens": drafted.proposed - drafted.accepted,
        }
        return {**usage, "completion_tokens_details": details}

    def _sent(self, body: dict[str, Any]) -> str:
        kind = f"{self._head['object']}{'.chunk' if 'chat' in self._head['object'] else ''}"
        return f"data: {json.dumps({**self._head, 'object': kind, **body})}\n\n"


class _Made:
    """The generated part of a text."""

    def __init__(self):
        self.text, self.reason = "", None
        self.mean = 0.0  # log-probability per generated token
        self.prompt: Iterable[Told] = ()
        self.told: list[Told] = []

    def add(self, event: Event) -> None:
        self.text += event.text
        self.reason, self.mean = event.reason, event.mean
        if event.is_prompt:
            self.prompt = event.told  # its objects are made when the text is written
        else:
            self.told.extend(event.told)


def _moved(told: Iterable[Told], by: int) -> list[Told]:
    return [Told(t.token, t.logprob, t.top, t.offset + by) for t in told]


def _placed(told: Iterable[Told], stream: TextStream, unseen: int | None) -> list[Told]:
    """Adds the offset of each prompt token. unseen: a begin-of-text token that is not in its text."""
    found, offset = [], 0
    for t in told:
        found.append(Told(t.token, t.logprob, t.top, offset))
        if found[1:] or t.token != unseen:
            offset += len(stream.push(t.token))
    return found
