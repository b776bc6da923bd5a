"""Cuts a long text where no usual tokenizer joins tokens, so that the pieces give the same ids as the whole text."""

from collections.abc import Iterator

# Tokenising needs some hundred bytes of memory per token of a piece.
PIECE_CHARACTERS = 65_536


def cut(text: str, limit: int) -> int:
    """The best place to cut `text` into `text[:place]` and `text[place:]`, with 0 < place <= limit.

    This is between a letter or digit and the following space or line end. The patterns of GPT-2, cl100k, o200k and
    Llama 3 all end a word there, whatever the context, so that
    `encode(text) == encode(text[:place]) + encode(text[place:])` exactly. (Tokenizers that put their own mark before
    each text, such as SentencePiece, add one mark per piece.) A text without such a place within half of `limit` is cut
    before its last white space, or else at `limit`.
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
        # One character more than the limit: `cut` looks at the character after the place.
        place = start + cut(text[start : start + limit + 1], limit)
        yield text[start:place]
        start = place
