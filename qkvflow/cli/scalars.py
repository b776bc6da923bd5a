"""Single values of a configuration: reading them strictly, and naming values and types in words of the user."""

import collections.abc
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import jmp

from qkvflow.errors import UserError


class Text(str):
    """Type of a field for words of a person: taken from the command line as they stand there, not read as YAML, so
    that `--text "Note: this"` is text. As `list[Text]` it collects the values of a flag that is given several times.
    """


LISTS = (list, tuple, set, collections.abc.Sequence)

_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Text: "text",
    Path: "a path",
    timedelta: "a time span such as 90s, 15m or 2h",
    jmp.Policy: "a precision such as f32 or p=f32,c=bf16",
}


def describe(cls: Any) -> str:
    """A type in the words of the user."""
    origin = typing.get_origin(cls) or cls
    if cls == list[Text]:
        return "text; may be given several times"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in typing.get_args(cls))
    if origin is typing.Literal:
        return " or ".join(map(str, typing.get_args(cls)))
    if origin in _NAMES:
        return _NAMES[origin]
    if is_mapping(origin):
        return "a mapping"
    if origin in LISTS:
        return "a list"
    return getattr(origin, "__name__", str(origin))


def show(raw: Any) -> str:
    """A value as the user wrote it."""
    return "empty (null)" if raw is None else repr(raw)


def is_mapping(origin: Any) -> bool:
    """Whether a type is a dictionary or the like."""
    return isinstance(origin, type) and issubclass(origin, Mapping)


def text_fields(cls: type) -> dict[str, bool]:
    """The fields of a class that take `Text`, and whether each takes several."""
    options = {name: (hint, *typing.get_args(hint)) for name, hint in typing.get_type_hints(cls).items()}
    return {name: list[Text] in hints for name, hints in options.items() if Text in hints or list[Text] in hints}


def _decode_bool(raw: Any, path: str) -> bool:
    if raw is True or raw == "true":
        return True
    if raw is False or raw == "false":
        return False
    raise UserError(f"`{path}` must be true or false, but is {show(raw)}")


def _decode_int(raw: Any, path: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        try:
            return int(raw)
        except ValueError:
            pass
    raise UserError(f"`{path}` must be an integer, but is {show(raw)}")


def _decode_float(raw: Any, path: str) -> float:
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        try:
            return float(raw)
        except ValueError:
            pass
    raise UserError(f"`{path}` must be a number, but is {show(raw)}")


def _decode_str(raw: Any, path: str) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    quotes = " (put it in quotes)" if isinstance(raw, bool) else ""
    raise UserError(f"`{path}` must be text, but is {show(raw)}{quotes}")


SCALARS = {bool: _decode_bool, int: _decode_int, float: _decode_float, str: _decode_str, Text: _decode_str}
