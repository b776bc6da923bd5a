"""`/tokenize`, `/detokenize` and `/tokenizer_info`, like vLLM's, for lm-evaluation-harness."""

from typing import Any

from qkvflow.errors import UserError
from qkvflow.generation.text import encode_prompt
from qkvflow.generation.writer import Writer
from qkvflow.serving import fields
from qkvflow.serving.errors import wrong
from qkvflow.serving.fields import Fields

TOKENIZE = Fields(
    {
        "model": fields.text,
        "prompt": fields.text,
        "add_special_tokens": fields.truth,
        "return_token_strs": fields.truth,
    },
    idle={},
    harmless=frozenset(),
)
DETOKENIZE = Fields({"model": fields.text, "tokens": fields.anything}, idle={}, harmless=frozenset())


def tokenize(raw: Any, writer: Writer, max_length: int) -> dict[str, Any]:
    """The tokens of a text, with the begin-of-text token if there is one, unless `add_special_tokens` is false."""
    values = TOKENIZE.read(raw, '{"prompt": "Once"}')
    if "prompt" not in values:
        raise wrong("prompt", "`prompt` is missing: give the text to tokenize.")
    text = values["prompt"]
    try:
        text.encode()
        special = values.get("add_special_tokens", True)
        tokens = encode_prompt(writer.tokenizer, text) if special else list(writer.tokenizer.encode(text))
    except (UserError, UnicodeEncodeError) as error:
        raise wrong("prompt", f"`prompt` has no tokens: {error}") from None
    names = [writer.vocabulary.name(token) for token in tokens] if values.get("return_token_strs") else None
    return {"count": len(tokens), "max_model_len": max_length, "tokens": tokens, "token_strs": names}


def detokenize(raw: Any, writer: Writer) -> dict[str, Any]:
    """The text of tokens."""
    tokens = DETOKENIZE.read(raw, '{"tokens": [1, 2]}').get("tokens")
    last = len(writer.vocabulary) - 1
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token <= last for token in tokens):
        raise wrong("tokens", f"`tokens` must be a list of numbers from 0 to {last}.")
    return {"prompt": writer.vocabulary.decode(tokens)}


def tokenizer_info(writer: Writer, max_length: int) -> dict[str, Any]:
    """What clients need to know about the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": len(writer.vocabulary),
        "model_max_length": max_length,
        **writer.vocabulary.special,
        "chat_template": writer.tokenizer.chat_template,
    }
