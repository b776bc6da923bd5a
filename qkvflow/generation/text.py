"""Between text and tokens while text is made: prompts, characters that are complete, stop strings."""

from collections.abc import Sequence

from levanter.tokenizers import MarinTokenizer

from qkvflow.errors import UserError

INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet
_WINDOW, _CONTEXT = 32, 8  # tokens that are decoded together, and those of them that stay when the window moves on


def encode_prompt(tokenizer: MarinTokenizer, text: str) -> list[int]:
    """The tokens of a prompt, as a document begins in training: with the begin-of-text token if there is one.

    An empty prompt is the beginning of a new document: begin-of-text, or else end-of-text, which ends the one before.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("The prompt is not text: it has bytes or half characters that are not UTF-8.") from None
    ids = list(tokenizer.encode(text)) if text else []
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    if not ids:
        raise UserError("The prompt is empty, and the tokenizer has no token that begins a text: give some text.")
    return ids


class TextStream:
    """The text of tokens that come one by one, as far as its characters are complete.

    A character may be spread over several tokens; what could still become another one is held back. Prompt tokens only
    give context: some tokenizers write a token differently at the beginning of a text.
    """

    def __init__(self, tokenizer: MarinTokenizer, prompt: Sequence[int] = ()):
        self._decode = tokenizer.decode
        self._ids = list(prompt)[-_CONTEXT:]
        self._known = len(self._decode(self._ids))  # characters of `_ids` that were given out or are the prompt's

    def push(self, token: int) -> str:
        """The text that is complete with this token."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        # Only the last character can be incomplete: bytes that are no character at all are known to be none.
        complete = text[:-1] if text.endswith(INCOMPLETE) else text
        new = complete[self._known :]
        self._known += len(new)
        if complete == text and len(self._ids) > _WINDOW:
            self._ids = self._ids[-_CONTEXT:]
            self._known = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """What is held back when no more tokens come."""
        return self._decode(self._ids)[self._known :]


class StopStrings:
    """Cuts a text that comes in pieces before the first of `stops`, which may be spread over pieces."""

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(what can be shown, whether a stop string is reached)."""
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
        """What is held back when no more text comes."""
        shown, self._held = self._held, ""
        return shown


class Continuation:
    """The text behind one prompt, token by token: what to show, and why it ended.

    reason: None while it goes on; `stop` after the end-of-text token or a stop string, `length` at its full length.
    """

    def __init__(self, tokenizer: MarinTokenizer, prompt: Sequence[int], stops: Sequence[str], stop_tokens=()):
        self._stream, self._stops = TextStream(tokenizer, prompt), StopStrings(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self.tokens = 0
        self.reason: str | None = None

    def push(self, token: int, complete: bool) -> str:
        """The text that this token adds. complete: it is the last one."""
        self.tokens += 1
        if token in self._stop_tokens:
            return self._end("stop", "")
        shown, stopped = self._stops.push(self._stream.push(token))
        if stopped:
            self.reason = "stop"
            return shown
        return self._end("length", shown) if complete else shown

    def _end(self, reason: str, shown: str) -> str:
        rest, stopped = self._stops.push(self._stream.finish())
        self.reason = "stop" if stopped else reason
        return shown + rest + ("" if stopped else self._stops.finish())


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
