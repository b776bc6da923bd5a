"""The one exception for mistakes of the user: programs print its message alone, without a traceback."""


class UserError(ValueError):
    """A wrong key, file, combination or value. The message says what is wrong, why, and how to mend it."""
