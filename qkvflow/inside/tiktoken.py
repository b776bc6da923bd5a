"""Of tiktoken: what an encoding is made of."""

import tiktoken


def definition(encoding: tiktoken.Encoding) -> tuple[dict[bytes, int], dict[str, int], str]:
    """Ranks of mergeable tokens, numbers of special tokens, and the regular expression that makes words.

    Reason: tiktoken shows encodings by what they do only, and another tokenizer is built from what they are.
    """
    return encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str
