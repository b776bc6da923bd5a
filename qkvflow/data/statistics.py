"""The unigram baseline: how well the validation text can be predicted without context."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer
from levanter.utils.hf_utils import byte_length_of_token

from qkvflow.data.byte_level import byte_alphabet
from qkvflow.data.tokenizers import number_of_ids
from qkvflow.errors import UserError

_TOKENS_PER_READ = 1 << 22


@dataclass(frozen=True)
class UnigramEntropy:
    """In nats; n(v), m(v): counts of token v in the training and validation tokens; N, M: their sums."""

    nats_per_token: float
    """Cross-entropy -sum_v m(v)/M log((n(v) + 1) / (N + V)): comparable with a validation loss."""
    entropy_per_token: float
    """Entropy of the validation tokens, -sum_v m(v)/M log(m(v)/M): the minimum for any unigram model."""
    nats_per_byte: float | None
    """`nats_per_token` times M divided by the bytes of the validation text; None without byte lengths."""


def unigram_entropy(
    train: np.ndarray, validation: np.ndarray, byte_lengths: np.ndarray | None = None
) -> UnigramEntropy:
    """Cross-entropy of the validation tokens under the unigram distribution of the training tokens.

    Args:
        train: int [vocab], count of each token in the training data (`token_counts`); one is added to each count, so
            that a token not seen in training has non-zero probability.
        validation: int [vocab], the same for the validation data.
        byte_lengths: int [vocab], UTF-8 bytes of each token (`token_byte_lengths`).

    Raises:
        UserError: there are no validation tokens.
    """
    total = int(validation.sum())
    if total == 0:
        raise UserError("there are no validation tokens, so there is no unigram entropy")
    log_probability = np.log(train + 1.0) - np.log(train.sum() + float(len(train)))
    nats = float(-(validation @ log_probability) / total)
    seen = validation[validation > 0] / total
    num_bytes = 0 if byte_lengths is None else int(validation @ byte_lengths)
    return UnigramEntropy(
        nats_per_token=nats,
        entropy_per_token=float(-(seen @ np.log(seen))),
        nats_per_byte=nats * total / num_bytes if num_bytes else None,
    )


def token_counts(
    caches: Iterable[TreeCache[dict]], vocab_size: int, max_tokens: int = 50_000_000, field: str = "input_ids"
) -> np.ndarray:
    """int64 [vocab]: how often each token occurs in the first `max_tokens` tokens of each cache.

    Raises:
        UserError: a token is not in the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for cache in caches:
        stop = min(cache.flat_field_length(field), max_tokens) if len(cache) else 0
        data = cache.jagged_array_tree()[field].data
        for start in range(0, stop, _TOKENS_PER_READ):
            tokens = np.asarray(data[start : min(start + _TOKENS_PER_READ, stop)].read().result())
            for extreme in (tokens.min(), tokens.max()):
                if not 0 <= extreme < vocab_size:
                    raise UserError(
                        f"there is a token with the id {extreme}, but the vocabulary has {vocab_size}: the tokens were"
                        " made with another tokenizer. Name that one by `data.tokenizer`"
                    )
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def token_byte_lengths(tokenizer: MarinTokenizer) -> np.ndarray:
    """int64 [vocab]: the number of UTF-8 bytes of each token; 0 for special tokens.

    Differs from Levanter's `eval/bpb`, which decodes each token separately and therefore counts three bytes for a
    token that is part of a character. The tokens of a byte-level vocabulary have one letter per byte; what was added to
    it, such as runs of spaces, is plain text.
    """
    special = set(tokenizer.all_special_ids)
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [names.get(i, "") for i in range(number_of_ids(tokenizer))]
    alphabet = set(byte_alphabet())
    if alphabet <= set(tokens):
        sizes = (len(token) if alphabet.issuperset(token) else len(token.encode()) for token in tokens)
        lengths = [0 if i in special else size for i, size in enumerate(sizes)]
    else:
        lengths = [byte_length_of_token(tokenizer, i) if token else 0 for i, token in enumerate(tokens)]
    return np.asarray(lengths, dtype=np.int64)
