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
        param = self.param and _sendable(self.param)
        return {"error": {"message": _sendable(str(self)), "type": kind, "param": param, "code": self.code}}


def _sendable(text: str) -> str:
    """With lone surrogates, which UTF-8 cannot encode and JSON can contain, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def wrong(param: str, message: str, code: str | None = None) -> RequestError:
    """The error for an invalid value."""
    return RequestError(400, message, param=param, code=code)
