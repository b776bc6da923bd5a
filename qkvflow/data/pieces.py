"""Cuts a long text where no usual tokenizer joins tokens, so that the pieces give the same ids as the whole text."""

from collections.abc import Iterator

# Tokenising takes some hundred bytes of memory for each token of a piece.
PIECE_CHARACTERS = 65_536


def cut(text: str, limit: int) -> int:
    """The best place to cut `text` into `text[:place]` and `text[place:]`, with 0 < place <= limit.

    That is between a letter or digit and the space or line end after it: the patterns of GPT-2, cl100k, o200k
    and Llama 3 all end a word there, whatever stands left and right, so that
    `encode(text) == encode(text[:place]) + encode(text[place:])` exactly. (Tokenizers that put a mark of
    their own before each text, as SentencePiece does, add one such mark for each piece.) A text that offers
    no such place within half of `limit` is cut before its last white space, or else at `limit`.
    """
    if len(text) <= limit:
        return len(text)
    for place in range(limit, limit // 2, -1):
        if text[place] in " \n" and text[place - 1].isalnum():
            return place
    for place in range(limit, limit // 2, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return limit


def pieces(text: str, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """`text` in pieces of at most `limit` characters; their concatenation is `text`."""
    start = 0
    while start < len(text):
        # One character more than the limit: `cut` looks at what follows the place.
        place = start + cut(text[start : start + limit + 1], limit)
        yield text[start:place]
        start = place
