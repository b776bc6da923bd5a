"""The web application: `/v1/completions`, `/v1/models`, `/health`; every error in the form of OpenAI's API."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from qkvflow.errors import UserError
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.text import encode_prompt
from qkvflow.serving import protocol
from qkvflow.serving.body import read_json
from qkvflow.serving.protocol import CompletionRequest, RequestError
from qkvflow.serving.scheduler import Event, Job, Overloaded, Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one request may cost. max_length: tokens of a text, prompt included. Times in seconds; request_timeout
    counts from the arrival of a request to the end of its answer, waiting for a slot included."""

    max_length: int
    max_body_bytes: int = 2 * 2**20
    body_timeout: float = 30.0
    request_timeout: float = 600.0


def build_app(scheduler: Scheduler, name: str, limits: Limits) -> FastAPI:
    """The application that serves the scheduler's model under `name`. It starts the scheduler, and closes it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.close)

    app = FastAPI(title="qkvflow", lifespan=lifespan, openapi_url=None)
    card = protocol.model_card(name, protocol.now())

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError):
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return JSONResponse(error.body, error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException):
        what = f"{request.method} {request.url.path}: {error.detail}. There are POST /v1/completions, GET /v1/models."
        return JSONResponse(RequestError(error.status_code, what).body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception):
        return JSONResponse(RequestError(500, "The server failed; its log says how.").body, 500)

    @app.get("/health")
    async def health():
        return {"status": "ok", "model": name, **scheduler.load()}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str):
        _check_model(wanted, name)
        return card

    @app.post("/v1/completions")
    async def completions(request: Request):
        deadline = asyncio.get_running_loop().time() + limits.request_timeout
        raw = await read_json(request, limits.max_body_bytes, limits.body_timeout)
        wanted = protocol.parse_request(raw)
        _check_model(wanted.model, name)
        texts = _Texts(scheduler, deadline)
        # Reading a long prompt takes a while; other requests go on.
        await asyncio.to_thread(texts.prepare, wanted, limits)
        texts.submit()
        identity, created = f"cmpl-{secrets.token_hex(12)}", protocol.now()
        if wanted.stream:
            pieces = _stream(texts, wanted, identity, name, created)
            return StreamingResponse(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        gone = asyncio.create_task(_until_gone(request))
        answer = asyncio.create_task(_collect(texts, wanted))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise RequestError(499, "The client has left.")
            choices, used = answer.result()
            return protocol.completion(identity, name, created, choices, used)
        finally:
            for task in (gone, answer):
                task.cancel()
            texts.cancel()

    return app


class _Texts:
    """The texts of one request, and the news of them: (index, event)."""

    def __init__(self, scheduler: Scheduler, deadline: float):
        self._scheduler, self._deadline = scheduler, deadline
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.jobs: list[Job] = []
        self.echoes: list[str] = []
        self.prompt_tokens = 0

    def prepare(self, wanted: CompletionRequest, limits: Limits) -> None:
        """Checks everything and makes the jobs. Errors: `RequestError`."""
        writer = self._scheduler.writer
        try:
            control = writer.prepared.check_control(wanted.control)
        except UserError as error:
            raise protocol.bad_value(error, "control") from None
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed
        for prompt in wanted.prompts:
            tokens = self._tokens(prompt)
            new = _room(len(tokens), wanted.max_tokens, limits.max_length)
            self.prompt_tokens += len(tokens)
            for _ in range(wanted.choices):
                try:
                    temperature = 1.0 if wanted.temperature is None else wanted.temperature
                    options = SamplingOptions(temperature, wanted.top_k, wanted.top_p, seed + len(self.jobs))
                except UserError as error:
                    raise protocol.bad_value(error) from None
                self.jobs.append(Job(tokens, new, options, wanted.stops, control, self._receiver(len(self.jobs))))
                echo = prompt if isinstance(prompt, str) else writer.tokenizer.decode(prompt)
                self.echoes.append(echo if wanted.echo else "")

    def submit(self) -> None:
        try:
            self._scheduler.submit(self.jobs)
        except Overloaded:
            message = "Too many requests are waiting. Try again in a moment."
            raise RequestError(503, message, code="overloaded") from None

    def cancel(self) -> None:
        for job in self.jobs:
            self._scheduler.cancel(job)

    async def news(self) -> AsyncIterator[tuple[int, Event]]:
        """All events of all texts until the last has ended. Errors: `RequestError` 504 at the deadline."""
        left = len(self.jobs)
        while left:
            try:
                async with asyncio.timeout_at(self._deadline):
                    index, event = await self._news.get()
            except TimeoutError:
                raise RequestError(504, "The request took longer than the server allows.", code="timeout") from None
            if event.reason == "error":
                raise RequestError(500, "The server failed or was stopped while it made this text.")
            left -= event.reason is not None
            yield index, event

    def _receiver(self, index: int):
        def receive(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, event))

        return receive

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._scheduler.writer.tokenizer
        if isinstance(prompt, str):
            try:
                return encode_prompt(tokenizer, prompt)
            except UserError as error:
                raise protocol.bad_value(error, "prompt") from None
        if not prompt or not all(0 <= token < len(tokenizer) for token in prompt):
            message = f"A prompt of tokens must hold numbers from 0 to {len(tokenizer) - 1}, and at least one."
            raise RequestError(400, message, param="prompt")
        return prompt


def _room(prompt: int, max_tokens: int | None, max_length: int) -> int:
    """How many tokens to make: those asked for, or all that fit if `max_tokens` is null."""
    new = max(1, max_length - prompt) if max_tokens is None else max_tokens
    if prompt + new > max_length:
        message = (
            f"This model's maximum context length is {max_length} tokens, but you requested {prompt + new}"
            f" ({prompt} in the prompt, {new} to be made). Shorten the prompt, or set a smaller max_tokens."
        )
        raise RequestError(400, message, param="prompt", code="context_length_exceeded")
    return new


async def _collect(texts: _Texts, wanted: CompletionRequest) -> tuple[list[dict[str, Any]], dict[str, int]]:
    whole, reasons, made = list(texts.echoes), [None] * len(texts.jobs), [0] * len(texts.jobs)
    async for index, event in texts.news():
        whole[index] += event.text
        reasons[index], made[index] = event.reason, event.tokens
    choices = [protocol.choice(i, text, reason) for i, (text, reason) in enumerate(zip(whole, reasons, strict=True))]
    return choices, protocol.usage(texts.prompt_tokens, sum(made))


async def _stream(texts: _Texts, wanted: CompletionRequest, identity: str, name: str, created: int):
    """Server-sent events. Leaving it, at its end or because the client has left, frees the slots."""
    with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
    made = [0] * len(texts.jobs)

    def piece(choices, used=None) -> str:
        answer = protocol.completion(identity, name, created, choices, used)
        return f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"

    try:
        for index, echo in enumerate(texts.echoes):
            if echo:
                yield piece([protocol.choice(index, echo, None)])
        async for index, event in texts.news():
            made[index] = event.tokens
            yield piece([protocol.choice(index, event.text, event.reason)])
        if with_usage:
            yield piece([], protocol.usage(texts.prompt_tokens, sum(made)))
        yield "data: [DONE]\n\n"
    except RequestError as error:  # the status is sent already
        yield f"data: {json.dumps(error.body)}\n\n"
    finally:
        texts.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_model(wanted: str | None, name: str) -> None:
    if wanted not in (None, name):
        message = f"The model `{wanted}` does not exist here. This server has `{name}`."
        raise RequestError(404, message, param="model", code="model_not_found")
