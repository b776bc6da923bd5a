"""Connections that ask for nothing are closed, and there are no more than allowed; others do not notice."""

import contextlib
import json
import socket
import time

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from support.serving import served

from qkvflow.serving import guarded

HEADER_TIMEOUT, MOST, STALL_TIMEOUT = 0.5, 20, 0.7
WHOLE = 2**26  # bytes of a response: far more than the buffers of sockets hold


@pytest.fixture(scope="module")
def url():
    app = FastAPI()

    @app.get("/")
    def root():
        return "here"

    @app.get("/slow")
    def slow():
        time.sleep(3 * HEADER_TIMEOUT)
        return "late"

    @app.get("/large")
    async def large():
        async def pieces():
            for _ in range(2000):
                yield b"x" * 2**16

        return StreamingResponse(pieces())

    @app.get("/whole")
    def whole():
        return Response(b"x" * WHOLE)

    with served(app, http=guarded(MOST, HEADER_TIMEOUT, STALL_TIMEOUT), ws="none", lifespan="off") as url:
        yield url


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def closed_after(sock, began):
    """Seconds until the server has closed it."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(2**16):
            pass
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: "])
def test_half_sent_headers(url, sent):
    began = time.monotonic()
    with connected(url) as sock:
        sock.sendall(sent)
        assert closed_after(sock, began) < HEADER_TIMEOUT + 2
        assert time.monotonic() - began > HEADER_TIMEOUT - 0.1


def test_headers_that_drip(url):
    """A byte now and then does not keep a connection open."""
    began = time.monotonic()
    with connected(url) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        while time.monotonic() - began < 10:
            sock.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < HEADER_TIMEOUT + 2


def test_answers_may_take_longer(url):
    """The limit is one on headers: an answer that is worked on is not cut."""
    assert httpx.get(f"{url}/slow", timeout=10).json() == "late"


def test_a_connection_is_used_again(url):
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(url).json() == "here"
            time.sleep(HEADER_TIMEOUT / 2)


def test_many_connections(url):
    """Those that are too many hear so, and there is room again when the others are closed."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(url)) for _ in range(MOST)]
        time.sleep(0.1)
        answer = stack.enter_context(connected(url))
        said = b""
        while piece := answer.recv(2**16):
            said += piece
        head, body = said.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "overloaded"
        for sock in socks:
            sock.close()
        time.sleep(0.1)
        assert httpx.get(url).json() == "here"


def test_three_hundred_half_sent_headers(url):
    """None stays, and the server answers others as soon as they are gone."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(url)) for _ in range(300)]
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        assert all(closed_after(sock, began) < HEADER_TIMEOUT + 3 for sock in socks)
        assert httpx.get(url).json() == "here"


def test_a_client_that_does_not_read(url):
    began = time.monotonic()
    with connected(url) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(STALL_TIMEOUT + 1.5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(2**20):
                received += len(piece)
    assert received < 2000 * 2**16, "the answer was cut"
    assert time.monotonic() - began < 10


def test_a_client_that_reads_slowly_gets_it_all(url):
    """A response that is written at once, and read in several times the limit."""
    with connected(url) as sock:
        sock.sendall(b"GET /whole HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        began, received = time.monotonic(), 0
        while piece := sock.recv(2**20):
            received += len(piece)
            time.sleep(max(0.0, began + 4 * STALL_TIMEOUT * received / WHOLE - time.monotonic()))
        assert time.monotonic() - began > 2 * STALL_TIMEOUT
    assert received > WHOLE
