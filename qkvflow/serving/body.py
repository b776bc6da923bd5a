"""Reads request bodies, with limits on size and time."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from qkvflow.serving.errors import RequestError

_DRAIN = 16  # bodies up to this many times the limit are read completely, so that the client receives the response


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """The body of a request.

    Raises:
        RequestError: 413 if it is too large, 408 if it is too slow.
    """
    try:
        return await asyncio.wait_for(_read(request, max_bytes), timeout)
    except TimeoutError:
        raise RequestError(408, f"The body of the request did not arrive within {timeout:g} seconds.") from None


def parse_json(body: bytes) -> Any:
    """The JSON value of a body.

    Raises:
        RequestError: 400 if it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"The body is not valid JSON: {error}.") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size <= max_bytes:
                pieces.append(piece)
            elif size > _DRAIN * max_bytes:
                break
            else:
                pieces.clear()
    except ClientDisconnect:
        raise RequestError(400, "The client disconnected before the request was complete.") from None
    if size > max_bytes:
        raise RequestError(413, f"The request has more than {max_bytes:,} bytes, the limit of this server.")
    return b"".join(pieces)
