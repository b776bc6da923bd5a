"""From a tiktoken encoding to a `tokenizers` tokenizer that gives the same ids on every text.

Differs from transformers' TikTokenConverter, which keeps every split of a token as a merge (a different merge order),
passes Rust-only regular expressions to Oniguruma (which takes `{1,3}+` as "one or more times"), and numbers special
tokens by position, which is wrong for vocabularies with gaps.
"""

import re
from itertools import pairwise

import regex
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from qkvflow.data.byte_level import byte_alphabet
from qkvflow.errors import UserError
from qkvflow.inside.tiktoken import definition

# `atom{m,n}+`, possessive in Rust's fancy-regex.
_POSSESSIVE_COUNT = re.compile(r"(\\[pP]\{[^}]*\}|\[(?:\\.|[^\]\\])*\]|\\.|[^\\\])}])(\{\d+(?:,\d*)?\})\+")

_PROBES = (
    "Hello, world!  It's 12345 o'clock; WE'LL see.\n\n\n  Indented\tby tab \r\n and   spaces   ",
    "def f(x):\n    return x**2  # code\n\n\nclass A:\n\tpass\n",
    "naïve façade — “quotes” … Ωμέγα привет 你好，世界 こんにちは 한국어 عربى हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\u00a0\u3000\ufffd\x00\x1f\x7f\x85\u2028 I’m ⅷ ² ½ ſ'ſ 'S",
    "1 12 123 1234 1234567 3.14159 0x7f ١٢٣٤",
    "   leading\n \n  \n\t\n trailing   \n",
)


def convert(encoding: tiktoken.Encoding) -> Tokenizer:
    """The byte-level BPE tokenizer with the ids of `encoding.encode(text, allowed_special="all")`.

    `len(vocabulary)` is the largest id + 1: ids that the encoding leaves out get an entry that no text reaches, because
    an embedding has one row for each id.

    Raises:
        UserError: the result differs from the encoding on a list of probing texts.
    """
    alphabet = byte_alphabet()
    ranks, special_tokens, pattern = definition(encoding)
    text_of = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    # o200k_harmony has two names for one id, which `tokenizers` cannot store: the first counts.
    specials = {number: name for name, number in reversed(special_tokens.items())}
    vocab = {text_of[token]: rank for token, rank in ranks.items()}
    vocab |= {name: number for number, name in sorted(specials.items())}
    for number in sorted(set(range(encoding.max_token_value + 1)) - set(vocab.values())):
        vocab[f"unused {number}"] = number  # no byte is written as a space in the byte alphabet
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _parts(ranks, token) if len(token) > 1 else ()
        # A token of three or more parts is only reached as a whole word, which `ignore_merges` handles.
        if len(parts) == 2:
            merges.append((text_of[parts[0]], text_of[parts[1]]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(_POSSESSIVE_COUNT.sub(r"(?>\1\2)", pattern)), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    names = [name for _, name in sorted(specials.items())]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    for probe in (*_PROBES, *(f"a{name} b" for name in names)):
        # Test the words too: a small vocabulary can give the same ids for different words.
        found = [word for word, _ in words.pre_tokenize_str(probe)], tokenizer.encode(probe).ids
        wanted = regex.findall(pattern, probe), encoding.encode(probe, allowed_special="all")
        if found != wanted:
            raise UserError(
                f"the tiktoken encoding {encoding.name!r} cannot be converted exactly: its regular expression has a"
                f" different meaning in the `tokenizers` library (found with the text {probe!r}). Use a Hugging Face"
                " tokenizer folder instead."
            )
    return tokenizer


def _parts(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The result of BPE on `token`'s bytes with only the merges that precede the token itself."""
    parts = [bytes([byte]) for byte in token]
    limit = ranks[token]
    while len(parts) > 1:
        pairs = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        best = min(pairs)
        if best >= limit:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
