"""Single tokens: their bytes, the text that they add, their name in a list of tokens."""

from levanter.tokenizers import MarinTokenizer

from qkvflow.data.byte_level import byte_alphabet

BROKEN = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet
_BYTES = {character: byte for byte, character in enumerate(byte_alphabet())}


class Vocabulary:
    """The tokens of a tokenizer.

    Bytes that are no text of their own come in two kinds. Byte-level tokenizers (GPT-2, Llama-3) write all bytes one
    after another and read the whole as UTF-8: only a character at the end can be incomplete. Tokenizers with byte
    fallback (Llama-2, Mistral, Gemma) have tokens `<0xE4>` beside those of text: a run of them is read as one, and if
    any byte of it is wrong, all of it is. So a run says nothing until it has ended.
    """

    def __init__(self, tokenizer: MarinTokenizer):
        self.tokenizer = tokenizer
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = zip(range(256), names, (tokenizer.convert_tokens_to_ids(name) for name in names), strict=True)
        # A tokenizer may have such a token as plain text.
        self._fallback = {
            i: byte for byte, name, i in ids if i is not None and i >= 0 and tokenizer.decode([i]) != name
        }
        self._anchor = list(tokenizer.encode("a"))[-1:]
        self._before = tokenizer.decode(self._anchor)
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.tokenizer)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)

    def is_fallback(self, token: int) -> bool:
        """Whether it is a token for one byte, beside tokens of text."""
        return token in self._fallback

    def text(self, token: int) -> str:
        """What it adds behind other text, where some tokenizers write it differently."""
        if token not in self._texts:
            whole = self.decode([*self._anchor, token])
            behind = whole.startswith(self._before)
            self._texts[token] = whole[len(self._before) :] if behind else self.decode([token])
        return self._texts[token]

    def bytes(self, token: int) -> bytes:
        """Its bytes, which may be a part of a character."""
        if token in self._fallback:
            return bytes([self._fallback[token]])
        text = self.text(token)
        if BROKEN in text:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            if all(character in _BYTES for character in name):
                return bytes(_BYTES[character] for character in name)
        return text.encode()

    def name(self, token: int) -> str:
        r"""How it stands in a list of tokens: its text, or `bytes:\xe4\xb8` if its bytes are no text."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
