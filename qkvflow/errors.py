"""User errors and notices: programs print only the message, without a traceback."""

_LONGEST = 120  # characters of what a user wrote that are shown back to them


class UserError(ValueError):
    """A wrong key, file, combination or value. The message says what is wrong, why, and how to fix it."""


class Notice(UserWarning):
    """Something that the user should know but that does not stop the program:
    `warnings.warn(Notice("..."), stacklevel=2)`.

    Programs show it as a line of its own; in Python it is a warning like others.
    """


def first_line(error: BaseException, longest: int = 300) -> str:
    """The first line of what an error says, or the name of its class if it says nothing; for a message."""
    return shortened(next(iter(str(error).strip().splitlines()), "") or type(error).__name__, longest)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """A text as it is, or its beginning and its length if it is longer than a message should be."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
