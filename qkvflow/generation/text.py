"""Between text and tokens during generation: prompts, complete characters, stop strings."""

import codecs
from collections.abc import Sequence

from levanter.tokenizers import MarinTokenizer

from qkvflow.errors import UserError
from qkvflow.files import is_unicode
from qkvflow.generation.vocabulary import Vocabulary

_WINDOW, _CONTEXT = 32, 8  # tokens decoded together, and how many of them stay when the window moves on
_LONGEST = 4  # bytes per character, and so the maximum number of tokens
_CHARACTERS, _CUT = 8, 64  # estimated characters per token; maximum tokens per word


def encode_prompt(tokenizer: MarinTokenizer, text: str) -> list[int]:
    """The tokens of a prompt, like a document in training: with the begin-of-text token if there is one.

    An empty prompt starts a new document: begin-of-text, or else end-of-text, which ends the previous document.
    """
    if not is_unicode(text):
        raise UserError("The prompt is not text: it contains bytes or half characters that are not UTF-8.")
    ids = list(tokenizer.encode(text)) if text else []
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    if not ids:
        raise UserError("The prompt is empty, and the tokenizer has no begin-of-text token: give some text.")
    return ids


def clearly_longer(tokenizer: MarinTokenizer, text: str, length: int) -> bool:
    """Whether a text has more than `length` tokens, from reading little more than that. False if uncertain."""
    characters = _CHARACTERS * (length + _CUT)
    while characters < len(text):
        # `encode_prompt` reports lone surrogates, which no tokenizer accepts.
        beginning = text[:characters].encode(errors="replace").decode()
        # A word that is cut has more tokens than within the whole text.
        if len(tokenizer.encode(beginning)) > length + _CUT:
            return True
        characters *= 4
    return False


class TextStream:
    """The text of tokens that arrive one by one, up to where no later token can change it.

    The pieces together equal the tokenizer's text of all tokens at once. Prompt tokens only give context: some
    tokenizers write a token differently at the beginning of a text. An incomplete character at the end of a prompt of
    tokens belongs to the text after it.
    """

    def __init__(self, vocabulary: Vocabulary | MarinTokenizer, prompt: Sequence[int] = ()):
        vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        self._vocabulary = vocabulary
        ids = list(prompt)
        if ids[:1] == [vocabulary.tokenizer.bos_token_id]:
            del ids[0]  # it is no text, but text after it may begin with a space
        self._ids = self._context(ids)
        run = self._run()
        held = bool(run) and not _is_text(run)
        self._known = len(self._decode(self._ids[: -len(run)] if held else self._ids))  # characters already returned
        self._known -= not run and self._ends_open()

    @property
    def held(self) -> int:
        """Number of characters held back."""
        return len(self._decode(self._ids)) - self._known

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(int(token))
        if self._vocabulary.is_fallback(token):
            return ""
        text, is_open = self._decode(self._ids), self._ends_open()
        new = text[self._known : len(text) - is_open]
        self._known += len(new)
        if not is_open and len(self._ids) > _WINDOW:
            self._ids = self._context(self._ids)
            self._known = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """The text held back, if no more tokens come."""
        return self._decode(self._ids)[self._known :]

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.decode(ids)

    def _context(self, ids: list[int]) -> list[int]:
        """The last tokens, starting where no run of bytes is cut."""
        start = max(0, len(ids) - _CONTEXT)
        while start > 0 and self._vocabulary.is_fallback(ids[start]):
            start -= 1
        return ids[start:]

    def _run(self) -> bytes:
        """The bytes of the final run of byte tokens."""
        run = []
        for token in reversed(self._ids):
            if not self._vocabulary.is_fallback(token):
                break
            run.append(self._vocabulary.bytes(token))
        return b"".join(reversed(run))

    def _ends_open(self) -> bool:
        """Whether the last character, of a byte-level tokenizer, may still change."""
        end = b"".join(self._vocabulary.bytes(token) for token in self._ids[-_LONGEST:])
        return codecs.utf_8_decode(end, "replace", False)[1] < len(end)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


class StopStrings:
    """Cuts a text that arrives in pieces before the first of `stops`, which may span pieces."""

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was reached)."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """The text held back, if no more text comes."""
        shown, self._held = self._held, ""
        return shown


class Continuation:
    """The text after one prompt, token by token: what to show, and why it ended.

    Attributes:
        reason: None while it continues; `stop` after the end-of-text token or a stop string, `length` at full length.
        made, shown: numbers of characters of the text so far, and of those shown; a possible beginning of a stop string
            is held back.
    """

    def __init__(
        self, vocabulary: Vocabulary | MarinTokenizer, prompt: Sequence[int], stops: Sequence[str], stop_tokens=()
    ):
        self._vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        self._stream, self._stops = TextStream(self._vocabulary, prompt), StopStrings(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self.tokens = self.made = self.shown = 0
        self.reason: str | None = None

    def push(self, token: int, complete: bool) -> str:
        """The text that this token adds.

        Args:
            complete: whether it is the last one.
        """
        self.tokens += 1
        if token in self._stop_tokens:
            return self._show(self._end("stop", ""))
        new = self._stream.push(token)
        self.made += len(new)
        shown, stopped = self._stops.push(new)
        if stopped:
            self.reason = "stop"
        return self._show(self._end("length", shown) if complete and not stopped else shown)

    def offset_of(self, token: int, before: int) -> int:
        """The offset in the text at which the last pushed token begins.

        Args:
            before: `made` before it.
        """
        if token in self._stop_tokens:
            return self.made
        return max(before, self.made - len(self._vocabulary.text(token)))

    def _end(self, reason: str, shown: str) -> str:
        new = self._stream.finish()
        self.made += len(new)
        rest, stopped = self._stops.push(new)
        self.reason = "stop" if stopped else reason
        return shown + rest + ("" if stopped else self._stops.finish())

    def _show(self, text: str) -> str:
        self.shown += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
