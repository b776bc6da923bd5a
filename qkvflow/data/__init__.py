"""Data: from text and a tokenizer's name to Levanter's token caches."""

from qkvflow.data.checks import TokenCounts, check_enough_tokens
from qkvflow.data.config import DataConfig
from qkvflow.data.sources import BuiltinSource, FilesSource
from qkvflow.data.tokenizers import (
    copy_tokenizer,
    load_tokenizer,
    number_of_ids,
    resolve_tokenizer,
    same_tokenizer,
    tokenizer_fingerprint,
)

__all__ = [
    "BuiltinSource",
    "DataConfig",
    "FilesSource",
    "TokenCounts",
    "check_enough_tokens",
    "copy_tokenizer",
    "load_tokenizer",
    "number_of_ids",
    "resolve_tokenizer",
    "same_tokenizer",
    "tokenizer_fingerprint",
]
