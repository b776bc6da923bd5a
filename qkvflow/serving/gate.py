"""Access control: rejects web pages from other sites, and clients without the key.

A browser lets any page send requests to local servers. It sends the page's own name as `Host` if that name was resolved
to this machine (DNS rebinding), names the page in `Origin` if it is from another site, and asks for permission before
it sends JSON there. Therefore names are checked, and a body must be declared as JSON.
"""

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qkvflow.serving.errors import RequestError

OPEN_PATHS = ("/health",)  # need no key
ANY = "*"


@dataclass(frozen=True)
class Access:
    """Who may send requests.

    Attributes:
        hosts: names under which the server may be addressed, besides `localhost` and IP addresses; `*` for any.
        origins: sites whose pages may send requests, such as `https://example.org`; `*` for any.
        api_key: None for no key.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    api_key: str | None = None


class Gate:
    """ASGI middleware that rejects requests not allowed by `access`."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope["method"], scope["path"], Headers(scope=scope))
        except RequestError as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await JSONResponse(error.body, error.status, headers=headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        access, host = self._access, headers.get("host", "")
        if not _is_allowed(_name(host), access.hosts):
            message = (
                f"This server does not accept the host name {_name(host)[:80]!r}. To allow it, start the server with"
                " --allowed_hosts NAME."
            )
            raise RequestError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        is_own = origin is not None and origin.partition("://")[2] == host
        if origin is not None and not is_own and not {origin, ANY} & set(access.origins):
            message = (
                f"Pages from {origin[:80]!r} may not use this server. To allow them, start it with --allowed_origins."
            )
            raise RequestError(403, message, code="origin_not_allowed")
        if access.api_key is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            known = secrets.compare_digest(given.strip().encode(), access.api_key.encode())
            if scheme.lower() != "bearer" or not known:
                raise RequestError(
                    401, "Incorrect API key: send it as `Authorization: Bearer KEY`.", code="invalid_api_key"
                )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            message = (
                f"The body must be sent as `Content-Type: application/json`, not {kind[:80] or 'without a type'!r}."
            )
            raise RequestError(415, message, code="unsupported_media_type")


def guard(app: Starlette, access: Access) -> None:
    """Puts the gate in front of an application, and answers the preflight requests of browsers."""
    app.add_middleware(Gate, access=access)
    if access.origins:  # outside the gate: preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )


def _name(host: str) -> str:
    """The host without its port, in lower case."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_allowed(name: str, hosts: Sequence[str]) -> bool:
    if name == "localhost" or name.endswith(".localhost") or ANY in hosts or name in map(_name, hosts):
        return True
    try:
        ipaddress.ip_address(name)  # the name of a page can never be an address
    except ValueError:
        return False
    return True
