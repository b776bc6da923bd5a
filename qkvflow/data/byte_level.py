"""The byte alphabet of byte-level BPE, and the tokenizer whose ids are the bytes themselves."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte 0..255: the byte's own character if printable, otherwise 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    code_points = {byte: byte for byte in printable} | {byte: 256 + n for n, byte in enumerate(others)}
    return [chr(code_points[byte]) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document; the round trip is exact for any text."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
