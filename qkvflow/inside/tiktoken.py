"""tiktoken internals: the definition of an encoding."""

import tiktoken


def definition(encoding: tiktoken.Encoding) -> tuple[dict[bytes, int], dict[str, int], str]:
    """Ranks of mergeable tokens, ids of special tokens, and the regular expression that splits words.

    Reason: tiktoken's interface only encodes and decodes; building another tokenizer needs the definition.
    """
    return encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str
