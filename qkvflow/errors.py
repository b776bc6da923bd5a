"""Mistakes of the user, and what a person should know: programs print the message alone, without a traceback."""

_LONGEST = 120  # characters of what a user wrote that are shown back to them


class UserError(ValueError):
    """A wrong key, file, combination or value. The message says what is wrong, why, and how to mend it."""


class Notice(UserWarning):
    """Something that a person should know and that stops nothing: `warnings.warn(Notice("..."), stacklevel=2)`.

    Programs show it as a line of its own; in Python it is a warning like others.
    """


def shortened(text: str, longest: int = _LONGEST) -> str:
    """A text as it is, or its beginning and its length if it is longer than a message should be."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
