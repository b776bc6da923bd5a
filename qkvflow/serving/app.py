"""The web application: completions, chat, tokens, models, health; every error in the form of OpenAI's API."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from qkvflow.serving import chat, completions, tokens
from qkvflow.serving.body import parse_json, read_body
from qkvflow.serving.errors import RequestError
from qkvflow.serving.gate import Access, guard
from qkvflow.serving.scheduler import Scheduler
from qkvflow.serving.texts import Texts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits for one request. Times in seconds.

    Attributes:
        max_length: tokens of a text, including its prompt.
        request_timeout: from the arrival of a request to the end of its response, including waiting for a slot.
    """

    max_length: int
    max_body_bytes: int = 2 * 2**20
    body_timeout: float = 30.0
    request_timeout: float = 600.0


def build_app(scheduler: Scheduler, name: str, limits: Limits, access: Access | None = None) -> FastAPI:
    """The application that serves the scheduler's model under `name`. It starts and closes the scheduler."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.close)

    access = access or Access()
    app = FastAPI(title="qkvflow", lifespan=lifespan, openapi_url=None)
    guard(app, access)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "qkvflow"}
    writer = scheduler.writer

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError):
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return JSONResponse(error.body, error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException):
        paths = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models"
        what = f"{request.method} {request.url.path}: {error.detail}. There are {paths}."
        return JSONResponse(RequestError(error.status_code, what).body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception):
        return JSONResponse(RequestError(500, "The server failed; see its log.").body, 500)

    async def read(request: Request, use: Callable[[Any], Any]) -> Any:
        """The result of `use` on a request's JSON, in a thread: long texts take time, and other requests continue."""
        body = await read_body(request, limits.max_body_bytes, limits.body_timeout)
        return await asyncio.to_thread(lambda: use(_for_model(parse_json(body), name)))

    async def answer(request: Request, form: ModuleType, identity: str) -> Response:
        deadline = asyncio.get_running_loop().time() + limits.request_timeout
        order = await read(request, lambda raw: form.read(raw, writer, limits.max_length))
        head = {
            "id": f"{identity}-{secrets.token_hex(12)}",
            "object": form.OBJECT,
            "created": int(time.time()),
            "model": name,
        }
        texts = Texts(scheduler, order, form, head, deadline)
        texts.submit()
        if order.stream:
            return _Stream(texts)
        gone, whole = asyncio.create_task(_until_gone(request)), asyncio.create_task(texts.whole())
        try:
            await asyncio.wait({gone, whole}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise RequestError(499, "The client has left.")
            return Response(b"".join(whole.result()), media_type="application/json")
        finally:
            for task in (gone, whole):
                task.cancel()
            texts.cancel()

    @app.get("/health")
    async def health(response: Response):
        response.status_code = 503 if scheduler.is_broken else 200
        return {"status": "broken" if scheduler.is_broken else "ok", "model": name, **scheduler.load()}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str):
        _for_model({"model": wanted}, name)
        return card

    @app.post("/v1/completions")
    async def complete(request: Request):
        return await answer(request, completions, "cmpl")

    @app.post("/v1/chat/completions")
    async def complete_chat(request: Request):
        return await answer(request, chat, "chatcmpl")

    @app.post("/tokenize")
    async def tokenize(request: Request):
        return await read(request, lambda raw: JSONResponse(tokens.tokenize(raw, writer, limits.max_length)))

    @app.post("/detokenize")
    async def detokenize(request: Request):
        return await read(request, lambda raw: JSONResponse(tokens.detokenize(raw, writer)))

    @app.get("/tokenizer_info")
    async def tokenizer_info():
        return JSONResponse(tokens.tokenizer_info(writer, limits.max_length))

    return app


class _Stream(StreamingResponse):
    """The events of texts. However the stream ends, even before it has begun, the texts end too."""

    def __init__(self, texts: Texts):
        super().__init__(texts.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._texts = texts

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._texts.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _for_model(raw: Any, name: str) -> Any:
    """The JSON of a request, if it is for this model. Its other fields are not checked yet."""
    wanted = raw.get("model") if isinstance(raw, dict) else None
    if isinstance(wanted, str) and wanted != name:
        message = f"The model `{wanted[:200]}` does not exist. This server has `{name}`."
        raise RequestError(404, message, param="model", code="model_not_found")
    return raw
