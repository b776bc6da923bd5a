"""`/v1/completions` as OpenAI's API defines it, plus `top_k`, `control`, drafts and exits: request and response."""

from collections.abc import Sequence
from typing import Any

from qkvflow.errors import UserError
from qkvflow.generation.text import clearly_longer, encode_prompt
from qkvflow.generation.vocabulary import Vocabulary
from qkvflow.generation.writer import Writer
from qkvflow.serving import fields, order
from qkvflow.serving.errors import wrong
from qkvflow.serving.fields import Fields
from qkvflow.serving.job import Told
from qkvflow.serving.order import MAX_TEXTS, Order, Prompt

FIELDS = Fields(
    served={
        **order.SERVED,
        "prompt": fields.anything,
        "best_of": fields.integer(1),
        "echo": fields.truth,
        "logprobs": order.top_logprobs,
    },
    idle={**order.IDLE, "suffix": [""]},
    harmless=order.HARMLESS,
)
OBJECT = "text_completion"
_PROMPT = "`prompt` must be a text, a list of texts, a list of tokens or a list of lists of tokens."


def read(raw: Any, writer: Writer, max_length: int) -> Order:
    """Parses a request's JSON. The amount of work is limited before it starts.

    Raises:
        RequestError: the request is invalid.
    """
    values = FIELDS.read(raw, '{"prompt": "Once", "max_tokens": 16}')
    n, best_of = values.get("n", 1), values.get("best_of", values.get("n", 1))
    if best_of < n:
        raise wrong("best_of", f"`best_of` must be at least `n`, got {best_of} for {n}.")
    if best_of > n and values.get("stream"):
        raise wrong("best_of", "`best_of` above `n` cannot be streamed: the best text is only known at the end.")
    given = _listed(values.get("prompt", ""))
    common = order.check_common(values, writer, len(given) * best_of, of="prompt" if best_of == n else "best_of")
    prompts = [_prompt(prompt, writer, max_length) for prompt in given]
    new = [order.room(len(prompt.tokens), values.get("max_tokens", 16), max_length, "prompt") for prompt in prompts]
    return Order(prompts, new, values, common, best_of, values.get("echo", False), values.get("logprobs"))


def whole(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    """A choice."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def pieces(index: int, text: str, reason: str | None, logprobs: Any, first: bool) -> list[dict[str, Any]]:
    """The chunks of a streamed choice for new text."""
    return [whole(index, text, reason, logprobs)]


def logprobs(told: Sequence[Told], vocabulary: Vocabulary) -> dict[str, Any]:
    """The four lists of OpenAI's `logprobs`.

    Tokens with the same name must not hide each other: the most likely one represents them. As in OpenAI's API, the
    token itself is among the most likely ones, so there may be one more than requested.
    """
    likeliest = []
    for t in told:
        named: dict[str, float] = {}
        if t.logprob is not None:
            for token, logprob in (*t.top, (t.token, t.logprob)):
                name = vocabulary.name(token)
                named[name] = max(finite(logprob), named.get(name, UNLIKELY))
        likeliest.append(named or None)
    return {
        "tokens": [vocabulary.name(t.token) for t in told],
        "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in told],
        "top_logprobs": likeliest,
        "text_offset": [t.offset for t in told],
    }


UNLIKELY = -9999.0  # the value in OpenAI's API for a token with negligible probability


def finite(logprob: float) -> float:
    """Replaces infinity, which JSON lacks."""
    return logprob if logprob > UNLIKELY else UNLIKELY


def _listed(prompt: Any) -> list[Any]:
    """The prompts, each a text or a list of tokens, not yet checked."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise wrong("prompt", _PROMPT)
    if not prompt:
        raise wrong("prompt", "`prompt` is an empty list: give a text, or several.")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_TEXTS:
        raise wrong("prompt", f"{len(prompt)} prompts are given; one request can have at most {MAX_TEXTS} texts.")
    return prompt


def _prompt(given: Any, writer: Writer, max_length: int) -> Prompt:
    if isinstance(given, str):
        if clearly_longer(writer.tokenizer, given, max_length):
            raise order.too_long(max_length, "prompt")
        try:
            return Prompt(encode_prompt(writer.tokenizer, given), given)
        except UserError as error:
            raise wrong("prompt", str(error)) from None
    if not isinstance(given, list):
        raise wrong("prompt", _PROMPT)
    if len(given) > max_length:
        raise order.too_long(max_length, "prompt")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in given):
        raise wrong("prompt", _PROMPT)
    if not given or not all(0 <= token < len(writer.vocabulary) for token in given):
        last = len(writer.vocabulary) - 1
        raise wrong("prompt", f"A prompt of tokens must hold numbers from 0 to {last}, and at least one.")
    return Prompt(given)
