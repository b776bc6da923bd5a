"""Closes idle connections: incomplete headers, clients that do not read, too many connections.

Uvicorn only closes connections that are idle after a response.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from qkvflow.serving.errors import RequestError


def guarded(max_connections: int, header_timeout: float, stall_timeout: float) -> type[H11Protocol]:
    """A protocol for uvicorn.

    Args:
        max_connections: further connections get a 503 response and are closed.
        header_timeout: seconds from the first byte of a request, or from the connection, to the end of its headers.
        stall_timeout: seconds that a response may wait for its client to read any of it.
    """

    class Guarded(H11Protocol):
        _headers: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(_FULL)
                transport.close()
            else:
                self._watch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers, self._stalled = _stop(self._headers), _stop(self._stalled)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            self._watch_headers()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stalled is None:
                self._watch_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stalled = _stop(self._stalled)

        def _watch_reading(self) -> None:
            """Writing resumes when nearly all is read; until then a client that reads, however slowly, is kept."""
            unread = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(stall_timeout, self._check_reading, unread)

        def _check_reading(self, unread: int) -> None:
            if self.transport.get_write_buffer_size() < unread:
                self._watch_reading()
            else:
                self.transport.abort()

        def _watch_headers(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._headers = _stop(self._headers)
            elif self._headers is None:
                self._headers = self.loop.call_later(header_timeout, self._late)

        def _late(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Guarded


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _answer(error: RequestError) -> bytes:
    body = json.dumps(error.body).encode()
    head = f"HTTP/1.1 {error.status} Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


_FULL = _answer(RequestError(503, "Too many connections are open. Try again in a moment.", code="overloaded"))
