"""Single tokens: their bytes, the text that they add, their name in a list of tokens."""

from levanter.tokenizers import MarinTokenizer

from qkvflow.data.byte_level import byte_alphabet
from qkvflow.data.tokenizers import number_of_ids

BROKEN = "\ufffd"  # what a decoder returns for bytes that are not a (complete) character
_BYTES = {character: byte for byte, character in enumerate(byte_alphabet())}


class Vocabulary:
    """The tokens of a tokenizer.

    Bytes that are not text on their own come in two kinds. Byte-level tokenizers (GPT-2, Llama-3) concatenate all bytes
    and decode the whole as UTF-8: only the last character can be incomplete. Tokenizers with byte fallback (Llama-2,
    Mistral, Gemma) have tokens `<0xE4>` in addition to text tokens: a run of them is decoded as a unit, and one invalid
    byte makes the whole run invalid. So a run has no text until it has ended.
    """

    def __init__(self, tokenizer: MarinTokenizer):
        self.tokenizer = tokenizer
        self._size = number_of_ids(tokenizer)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = zip(range(256), names, (tokenizer.convert_tokens_to_ids(name) for name in names), strict=True)
        # A tokenizer may have such a token as ordinary text.
        self._fallback = {
            i: byte for byte, name, i in ids if i is not None and i >= 0 and tokenizer.decode([i]) != name
        }
        self._anchor = list(tokenizer.encode("a"))[-1:]
        self._before = tokenizer.decode(self._anchor)
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return self._size

    @property
    def special(self) -> dict[str, str | None]:
        """The tokens that begin, end and pad a text, by their names in transformers; None for one that is missing."""
        tokenizer, pad = self.tokenizer, self.tokenizer.pad_token_id
        filler = None if pad is None else str(tokenizer.convert_ids_to_tokens(pad))
        return {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": filler}

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)

    def is_fallback(self, token: int) -> bool:
        """Whether the token stands for one byte, in a tokenizer with text tokens."""
        return token in self._fallback

    def text(self, token: int) -> str:
        """The text it adds after other text, where some tokenizers write it differently."""
        if token not in self._texts:
            whole = self.decode([*self._anchor, token])
            behind = whole.startswith(self._before)
            self._texts[token] = whole[len(self._before) :] if behind else self.decode([token])
        return self._texts[token]

    def bytes(self, token: int) -> bytes:
        """Its bytes, possibly only part of a character."""
        if token in self._fallback:
            return bytes([self._fallback[token]])
        text = self.text(token)
        if BROKEN in text:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            if all(character in _BYTES for character in name):
                return bytes(_BYTES[character] for character in name)
        return text.encode()

    def name(self, token: int) -> str:
        r"""Its name in a list of tokens: its text, or `bytes:\xe4\xb8` if its bytes are not text."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
