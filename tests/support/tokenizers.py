"""Tokenizers of each kind with its own decoding, created on the spot."""

import json
from pathlib import Path

from levanter.tokenizers import MarinTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from qkvflow.data.tokenizers import load_tokenizer, resolve_tokenizer

SPACE = "▁"
WORDS = ("▁the", "▁see", "▁there", "see", "th", "er", "re", "e", "世", "é", "▁a", "ab", "!", "�")


def byte_level(folder: Path) -> MarinTokenizer:
    """GPT-2's kind: every byte is a token."""
    return load_tokenizer(resolve_tokenizer("byte", folder))


def byte_fallback(folder: Path, kind: str, **config) -> MarinTokenizer:
    """`llama` (prepends a space to each text, and removes it again), `mistral` (the same by Metaspace), `gemma` (no
    space).

    Letters and some words are tokens; all other characters consist of single-byte tokens. config: more lines of
    tokenizer_config.json.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *map(chr, range(97, 123))]
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append((word[: end - 1], word[end - 1]))
                tokens.append(word[:end])
        if word not in tokens:
            tokens.append(word)
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    read = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        tokenizer.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)])
    elif kind == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=False)
        tokenizer.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = decoders.Sequence(read)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def with_gaps(folder: Path) -> MarinTokenizer:
    """Words with the ids 0, 1 and 7; the end of a text is 5."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "bc": 1, "é": 7, "</s>": 5}, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)
