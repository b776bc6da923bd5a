"""Request errors in the format of OpenAI's API."""

from typing import Any


class RequestError(Exception):
    """An HTTP status, and OpenAI's error object. param: the field that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, message: str, code: str | None = None) -> RequestError:
    """The error for an invalid value."""
    return RequestError(400, message, param=param, code=code)
