"""Pages of other sites that a browser on this machine has open cannot use the server, and a key keeps others out."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from qkvflow.serving import Access
from qkvflow.serving.gate import Gate, guard


def ask(access, method="POST", path="/v1/completions", **headers):
    """The answer of an application behind the gate, which says 200 to all that comes through."""
    app = FastAPI()
    app.add_middleware(Gate, access=access)
    for open_path in ("/v1/completions", "/health"):
        app.api_route(open_path, methods=["GET", "POST"])(lambda: "through")
    given = {"host": "localhost:8000", "content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return await client.request(method, path, headers=given)

    return asyncio.run(send())


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST.", "a.localhost:1", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[::1]"],
)
def test_own_names(host):
    assert ask(Access(), host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "", "xlocalhost", "[evil.com]"]
)
def test_names_that_a_page_made_its_own(host):
    """DNS rebinding: the address is this machine, the name is the page's."""
    answer = ask(Access(), host=host)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert ask(Access(hosts=("*",)), host=host).status_code == 200


def test_hosts_that_were_allowed():
    assert ask(Access(hosts=("Model.example",)), host="model.example:8000").status_code == 200
    assert ask(Access(hosts=("model.example",)), host="other.example").status_code == 403
    for given in ("model.example:8000", "model.example."):  # as a request may name it
        assert ask(Access(hosts=(given,)), host="model.example:9000").status_code == 200
    refused = ask(Access(), host="Model.example:8000")
    assert "does not accept the host name 'model.example'." in refused.json()["error"]["message"]


def preflight(access, origin, **headers):
    """What the server says to the question of a browser before it sends a page's request."""
    app = FastAPI()
    guard(app, access)
    app.post("/v1/completions")(lambda: "through")
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type"

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return await client.options("/v1/completions", headers=asked | headers)

    return asyncio.run(send())


def test_a_browser_asks_before_it_sends():
    """It asks without the key. A page on the internet that asks a server of this machine says so."""
    access = Access(origins=("https://good.com",), api_key="sk-1")
    local = {"Access-Control-Request-Private-Network": "true"}
    answer = preflight(access, "https://good.com", **local)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://good.com"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].lower().split(", "))
    assert answer.headers["access-control-allow-private-network"] == "true"
    for denied in (preflight(access, "https://evil.com", **local), preflight(Access(), "https://good.com", **local)):
        assert denied.status_code in (400, 403)
        assert "access-control-allow-origin" not in denied.headers


def test_pages_of_other_sites():
    for origin in ("https://evil.com", "null", "http://localhost:3000", "http://localhost"):
        assert ask(Access(), origin=origin).json()["error"]["code"] == "origin_not_allowed"
    assert ask(Access(), origin="http://localhost:8000").status_code == 200, "its own"
    assert ask(Access(origins=("https://good.com",)), origin="https://good.com").status_code == 200
    assert ask(Access(origins=("https://good.com",)), origin="https://evil.com").status_code == 403
    assert ask(Access(origins=("*",)), origin="https://any.com").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; x=json"])
def test_what_a_page_may_send_without_asking(kind):
    answer = ask(Access(), content_type=kind)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def test_json_may_name_its_encoding():
    assert ask(Access(), content_type="Application/JSON; charset=utf-8").status_code == 200


def test_key():
    access = Access(api_key="sk-1")
    for authorization in ("", "sk-1", "Bearer sk-2", "Bearer sk-", "Bearer ü".encode()):
        answer = ask(access, authorization=authorization)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert ask(access, authorization="Bearer sk-1").status_code == 200
    assert ask(access, "GET", "/health").status_code == 200, "for what watches whether it lives"
