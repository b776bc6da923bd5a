"""What a prompt or chat request asks for: how many texts, their length, how tokens are chosen."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qkvflow.errors import UserError
from qkvflow.generation import ExitConfig
from qkvflow.generation.logprobs import MOST
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.generation.writer import Writer
from qkvflow.serving import exits, fields
from qkvflow.serving.errors import RequestError, wrong
from qkvflow.serving.fields import Check

MAX_TEXTS = 128  # per request

# Fields that both kinds of request have.
SERVED: dict[str, Check] = {
    "model": fields.text,
    "max_tokens": fields.integer(0),
    "temperature": fields.number(0),
    "top_p": fields.number(0, 1, above=True),
    "top_k": fields.top_k,
    "n": fields.integer(1),
    "stop": fields.stops,
    "seed": fields.integer(),
    "stream": fields.truth,
    "stream_options": fields.stream_options,
    "logit_bias": fields.biases,
    "control": fields.anything,
    "draft_steps": fields.integer(0),
    "draft_tokens": fields.integer(0),
    "exit": exits.limits,
}
IDLE: dict[str, Sequence[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "min_p": [0],
    "service_tier": ["auto", "default"],
}
HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})


@dataclass(frozen=True)
class Prompt:
    """A prompt to continue.

    Attributes:
        text: as it is echoed; None if it must be decoded from the tokens.
    """

    tokens: list[int]
    text: str | None = None


class Common(NamedTuple):
    """What all texts of a request share.

    Attributes:
        exits: None for the server's own.
    """

    control: np.ndarray | None
    exits: ExitConfig | None


@dataclass(frozen=True)
class Order:
    """The parsed contents of a request.

    Attributes:
        new_tokens: per prompt.
        best_of: texts generated per prompt, of which n are returned.
        top: number of most likely tokens reported per token; None without log-probabilities.
    """

    prompts: list[Prompt]
    new_tokens: list[int]
    values: dict[str, Any]
    common: Common
    best_of: int = 1
    echo: bool = False
    top: int | None = None

    @property
    def n(self) -> int:
        """Texts returned per prompt."""
        return self.values.get("n", 1)

    @property
    def stream(self) -> bool:
        return self.values.get("stream", False)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.values.get("stream_options", {}).get("include_usage"))

    def options(self) -> list[SamplingOptions]:
        """The options for each text of each prompt."""
        given = self.values
        seed = secrets.randbits(31) if given.get("seed") is None else given["seed"]
        bias, told = given.get("logit_bias", {}), self.top is not None or self.best_of > self.n
        return [
            SamplingOptions(
                given.get("temperature", 1.0),
                given.get("top_k"),
                given.get("top_p"),
                seed + text,
                bias,
                told,
                0 if given.get("draft_steps") == 0 else given.get("draft_tokens"),
                self.common.exits,
            )
            for text in range(len(self.prompts) * self.best_of)
        ]


def check_common(values: dict[str, Any], writer: Writer, texts: int, of: str) -> Common:
    """Checks fields in combination.

    Args:
        of: the field besides `n` that determines `texts`.
    """
    if texts > MAX_TEXTS:
        param = "n" if values.get("n", 1) > 1 else of
        raise wrong(param, f"{texts} texts are requested; one request can have at most {MAX_TEXTS}.")
    if "stream_options" in values and not values.get("stream"):
        raise wrong("stream_options", "`stream_options` is only allowed when `stream` is true.")
    most = writer.prepared.draft_tokens
    if values.get("draft_tokens", 0) > most:
        does = f"drafts up to {most} tokens for each pass" if most else "does not draft (--draft_steps)"
        raise wrong("draft_tokens", f"This server {does}, but `draft_tokens` is {values['draft_tokens']}.")
    drafts_at, steps = writer.prepared.draft_steps, values.get("draft_steps", 0)
    if steps not in (0, drafts_at):
        does = f"drafts at {drafts_at} steps" if drafts_at else "does not draft (--draft_steps)"
        raise wrong(
            "draft_steps",
            (f"This server {does}, but `draft_steps` is {steps}. Leave it out, or set it to 0 for no drafting."),
        )
    outside = [token for token in values.get("logit_bias", {}) if token >= len(writer.vocabulary)]
    if outside:
        raise wrong(
            "logit_bias", (f"`logit_bias`: tokens range from 0 to {len(writer.vocabulary) - 1}, got {outside[0]}.")
        )
    leaving = exits.config("exit", values.get("exit"), writer.prepared)
    try:
        return Common(writer.prepared.check_control(values.get("control")), leaving)
    except UserError as error:
        raise wrong("control", str(error)) from None


def room(prompt: int, max_tokens: int | None, max_length: int, of: str, limit: str = "max_tokens") -> int:
    """The number of tokens to generate: as requested, or as many as fit.

    Args:
        of: the name of the prompt field.
    """
    new = max(1, max_length - prompt) if max_tokens is None else max_tokens
    if prompt + new > max_length:
        param = of if prompt >= max_length else limit
        message = (
            f"This model's maximum context length is {max_length} tokens, but you requested {prompt + new} ({prompt} in"
            f" the prompt, {new} to generate). Shorten the prompt, or set a smaller {limit}."
        )
        raise wrong(param, message, code="context_length_exceeded")
    return new


def too_long(max_length: int, of: str) -> RequestError:
    """The error for a prompt that is too long to be read completely."""
    message = f"This model's maximum context length is {max_length} tokens, but the prompt has more. Shorten it."
    return wrong(of, message, code="context_length_exceeded")


def top_logprobs(name: str, value: Any) -> int:
    """The number of most likely tokens to report."""
    return fields.integer(0, MOST)(name, value)
