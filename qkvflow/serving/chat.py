"""`/v1/chat/completions`: messages formatted by the tokenizer's chat template, and response formats."""

from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from qkvflow.generation.text import clearly_longer
from qkvflow.generation.vocabulary import Vocabulary
from qkvflow.generation.writer import Writer
from qkvflow.serving import fields, order
from qkvflow.serving.completions import finite
from qkvflow.serving.errors import wrong
from qkvflow.serving.fields import Fields
from qkvflow.serving.job import Told
from qkvflow.serving.order import Order, Prompt

FIELDS = Fields(
    served={
        **order.SERVED,
        "messages": fields.anything,
        "max_completion_tokens": fields.integer(0),
        "logprobs": fields.truth,
        "top_logprobs": order.top_logprobs,
    },
    idle={
        **order.IDLE,
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "response_format": [{"type": "text"}],
        "modalities": [["text"]],
        "verbosity": ["medium"],
        "reasoning_effort": ["none"],
        "audio": [],
        "moderation": [],
        "web_search_options": [],
    },
    harmless=order.HARMLESS | {"parallel_tool_calls", "prediction", "prompt_cache_options"},
)
OBJECT = "chat.completion"
ROLES = ("system", "developer", "user", "assistant")
_KEYS = ("role", "content", "name")
_IDLE = ("type", "text")  # lm-evaluation-harness sends it up to 0.4.11; it changes nothing
MAX_MESSAGES = 1024


def read(raw: Any, writer: Writer, max_length: int) -> Order:
    """Parses a request's JSON.

    Raises:
        RequestError: the request is invalid, or the tokenizer has no chat template.
    """
    values = FIELDS.read(raw, '{"messages": [{"role": "user", "content": "Hello"}]}')
    if values.get("top_logprobs") is not None and not values.get("logprobs"):
        raise wrong("top_logprobs", "`top_logprobs` is only allowed when `logprobs` is true.")
    limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    if limit != "max_tokens" and "max_tokens" in values:
        raise wrong("max_tokens", "`max_tokens` and `max_completion_tokens` are the same limit: give only one of them.")
    common = order.check_common(values, writer, values.get("n", 1), of="n")
    text = _written(_messages(values.get("messages")), writer)
    if clearly_longer(writer.tokenizer, text, max_length):
        raise order.too_long(max_length, "messages")
    prompt = Prompt(list(writer.tokenizer.encode(text)), text)
    if not prompt.tokens:
        raise wrong("messages", "The tokenizer's chat template formats these messages as an empty text.")
    new = order.room(len(prompt.tokens), values.get(limit), max_length, "messages", limit)
    top = values.get("top_logprobs", 0) if values.get("logprobs") else None
    return Order([prompt], [new], values, common, values.get("n", 1), top=top)


def whole(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    """A choice."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def pieces(index: int, text: str, reason: str | None, logprobs: Any, first: bool) -> list[dict[str, Any]]:
    """The chunks of a streamed choice for new text: the role comes first, the reason last."""
    deltas: list[tuple[dict[str, Any], Any, str | None]] = []
    if first:
        deltas.append(({"role": "assistant", "content": ""}, None, None))
    if text or logprobs is not None:
        deltas.append(({"content": text}, logprobs, None))
    if reason is not None:
        deltas.append(({}, None, reason))
    return [{"index": index, "delta": d, "logprobs": told, "finish_reason": why} for d, told, why in deltas]


def logprobs(told: Sequence[Told], vocabulary: Vocabulary) -> dict[str, Any]:
    """OpenAI's list of tokens with their most likely alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.bytes(token)
        return {"token": vocabulary.name(token), "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(*other) for other in t.top]}
        for t in told
        if t.logprob is not None
    ]
    return {"content": content, "refusal": None}


def _messages(given: Any) -> list[dict[str, str]]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
        raise wrong("messages", f"`messages` must be a list of 1 to {MAX_MESSAGES} messages.")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(given)]


def _message(where: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise wrong(where, f'`{where}` must be an object such as {{"role": "user", "content": "Hello"}}.')
    for key, value in given.items():
        if key not in _KEYS and value is not None and (key, value) != _IDLE:
            raise wrong(f"{where}.{key:.40}", f"`{where}.{key:.40}` is not supported by this server: leave it out.")
    if given.get("role") not in ROLES:
        raise wrong(f"{where}.role", f"`{where}.role` must be one of {', '.join(ROLES)}.")
    message = {"role": given["role"], "content": _content(f"{where}.content", given.get("content"))}
    if given.get("name") is not None:
        message["name"] = fields.text(f"{where}.name", given["name"])
    return message


def _content(where: str, given: Any) -> str:
    """A text, or the concatenated texts of its parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong(where, f"`{where}` must be a text, or a list of parts of type text.")
    for i, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{where}[{i}]", f'`{where}[{i}]` must be a part such as {{"type": "text", "text": "Hello"}}.')
    return "".join(part["text"] for part in given)


def _written(messages: list[dict[str, str]], writer: Writer) -> str:
    """The messages as formatted by the template, with the beginning of the response, as transformers writes them.

    Differs from Levanter's rendering, which refuses what transformers leaves empty (Qwen's templates ask each message
    for `tool_calls`, Granite's for `thinking`) and loops with `break`.
    """
    template = writer.tokenizer.chat_template
    if template is None:
        raise wrong(
            "messages",
            "The tokenizer of this model has no chat template, so messages cannot be formatted as text: use"
            " /v1/completions, or put a `chat_template.jinja` into the run's folder `tokenizer`.",
            code="no_chat_template",
        )
    if "developer" not in template:  # OpenAI's name for the system; templates that do not know it may drop the message
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        special = {name: token for name, token in writer.vocabulary.special.items() if token is not None}
        (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **special)
        text.encode()
    except UnicodeEncodeError:
        raise wrong("messages", "`messages` are not text: they contain half characters that are not UTF-8.") from None
    except Exception as error:  # a template may reject messages, or fail in any way
        raise wrong("messages", f"The tokenizer's chat template rejects these messages: {error}") from None
    return text
