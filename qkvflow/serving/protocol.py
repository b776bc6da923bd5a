"""The request and the answers of `/v1/completions`, as OpenAI's API defines them, with `top_k` and `control` added."""

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from qkvflow.errors import UserError

MAX_STOPS, MAX_CHOICES = 16, 128


class RequestError(Exception):
    """What is wrong with a request: an HTTP status, and the error object of OpenAI's API."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class CompletionRequest(BaseModel):
    """Differs from OpenAI: no `logprobs`, `suffix`, penalties, `logit_bias`, `best_of` above n."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]] = ""
    max_tokens: StrictInt | None = Field(16, ge=1)
    temperature: StrictFloat | None = 1.0
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    n: StrictInt | None = Field(1, ge=1)
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    echo: StrictBool | None = False
    control: list[StrictFloat] | None = None
    user: StrictStr | None = None
    # Known to OpenAI's clients; accepted where they ask for nothing.
    best_of: StrictInt | None = None
    frequency_penalty: StrictFloat | None = 0
    presence_penalty: StrictFloat | None = 0
    logit_bias: dict[str, StrictFloat] | None = None
    logprobs: StrictInt | None = None
    suffix: StrictStr | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, as texts or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def choices(self) -> int:
        """Texts for each prompt."""
        return 1 if self.n is None else self.n


def parse_request(raw: Any) -> CompletionRequest:
    """Errors: `RequestError` that names the first field that is wrong."""
    if not isinstance(raw, dict):
        raise RequestError(400, 'The body must be a JSON object such as {"prompt": "Once", "max_tokens": 16}.')
    try:
        request = CompletionRequest.model_validate(raw)
    except ValidationError as error:
        raise _describe(error) from None
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "suffix"):
        if getattr(request, name):
            raise RequestError(400, f"`{name}` is not supported by this server: leave it out.", param=name)
    if request.best_of not in (None, request.choices):
        raise RequestError(400, "`best_of` is not supported by this server: leave it out.", param="best_of")
    if not request.prompts:
        raise RequestError(400, "`prompt` is an empty list: give a text, or several.", param="prompt")
    if len(request.prompts) * request.choices > MAX_CHOICES:
        asked = len(request.prompts) * request.choices
        raise RequestError(
            400, f"{asked} texts are asked for in one request; at most {MAX_CHOICES} are made.", param="n"
        )
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise RequestError(400, f"`stop` must be at most {MAX_STOPS} texts that are not empty.", param="stop")
    return request


def bad_value(error: UserError, param: str | None = None) -> RequestError:
    """A mistake in the values of a request."""
    return RequestError(400, str(error), param=param)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion(
    identity: str, model: str, created: int, choices: list[dict[str, Any]], used: dict[str, int] | None = None
) -> dict[str, Any]:
    """An answer, or a piece of one that streams."""
    answer = {"id": identity, "object": "text_completion", "created": created, "model": model, "choices": choices}
    return answer if used is None else {**answer, "usage": used}


def choice(index: int, text: str, reason: Literal["stop", "length"] | str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "qkvflow"}


def now() -> int:
    return int(time.time())


def _describe(error: ValidationError) -> RequestError:
    details = error.errors(include_url=False, include_input=False)
    # A union reports each of its members; the first part of the place is the field.
    field = str(details[0]["loc"][0]) if details[0]["loc"] else None
    if details[0]["type"] == "extra_forbidden":
        known = ", ".join(CompletionRequest.model_fields)
        return RequestError(400, f"Unrecognized request argument `{field}`. Known are: {known}.", param=field)
    if field == "prompt":
        message = "`prompt` must be a text, a list of texts, a list of tokens or a list of lists of tokens."
        return RequestError(400, message, param=field)
    reasons = "; or ".join(dict.fromkeys(d["msg"] for d in details if str(d["loc"][0]) == field))
    return RequestError(400, f"`{field}`: {reasons}.", param=field)
