"""Single values of a configuration: strict parsing, and descriptions of values and types for users."""

import collections.abc
import dataclasses
import math
import re
import reprlib
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import jmp
from draccus.utils import is_choice_type

from qkvflow.config import yaml_text
from qkvflow.config.yaml_file import read_written
from qkvflow.errors import UserError, shortened


class Text(str):
    """Type of a field for free text: taken from the command line as it is, including quotes, so that
    `--text "Note: this"` is text. As `list[Text]` it collects the values of a flag that is given several times.
    """


class Typed:
    """A value of the command line. For a field of text it is the text, for others what YAML reads in it.

    Attributes:
        text: as typed; not empty.
        where: `--key`, for messages.
    """

    def __init__(self, text: str, where: str):
        self.text = text
        self.where = where

    @cached_property
    def value(self) -> Any:
        """What YAML reads: `3`, `true`, `null`, `[a, b]`, `{a: 1}`; `@FILE.yaml` stands for what the file holds.

        Raises:
            UserError: it is no valid YAML.
        """
        if self.text.startswith("@") and self.text.endswith((".yaml", ".yml")):
            return read_written(Path(self.text[1:]))
        try:
            value = yaml_text.load(self.text, f"{self.where}: the value {shortened(self.text)}")
        except UserError:
            if self.text.lstrip()[:1] in ("[", "{", '"', "'", "!", "&"):
                raise
            return self.text  # words with a colon in them, say
        return self.text if value is None and self.text != "null" else value

    @property
    def as_text(self) -> str:
        """As typed, but for quotes around the whole."""
        text = self.text.strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            try:
                value = yaml_text.load(text, self.where)
            except UserError:
                return self.text
            return value if isinstance(value, str) else self.text
        return self.text

    def __repr__(self) -> str:
        return repr(shortened(self.text))


class Keys(dict[str, Any]):
    """Type of a field for keys of another configuration, such as that of a run: they are read together with it."""


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

_FEW = 4  # keys of a record that a message has room for
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def describe(cls: Any) -> str:
    """A type in the words of the user."""
    origin = typing.get_origin(cls) or cls
    if origin is Annotated:
        return describe(typing.get_args(cls)[0])
    if cls == list[Text]:
        return "text; may be given several times"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in typing.get_args(cls))
    if origin is typing.Literal:
        return " or ".join(map(str, typing.get_args(cls)))
    if origin in _NAMES:
        return _NAMES[origin]
    if is_mapping(origin):
        return "a mapping of keys to values"
    if origin in LISTS:
        return "a list"
    if dataclasses.is_dataclass(origin) and not is_choice_type(origin) and len(dataclasses.fields(origin)) <= _FEW:
        return f"a mapping of {', '.join(field.name for field in dataclasses.fields(origin) if field.init)}"
    return getattr(origin, "__name__", str(origin))


def show(raw: Any) -> str:
    """A value as the user wrote it, its beginning if it is long."""
    if raw is None:
        return "empty (null)"
    if isinstance(raw, Typed):
        return repr(raw)
    if isinstance(raw, str):
        return repr(shortened(raw))
    number = isinstance(raw, yaml_text.WrittenInt | yaml_text.WrittenFloat)
    return shortened(raw.text) if number else _SHORT.repr(raw)


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
        return int(raw)
    if isinstance(raw, str) and re.fullmatch(r"[-+]?[0-9]{1,400}", raw):
        return int(raw)
    raise UserError(f"`{path}` must be an integer, but is {show(raw)}")


def _decode_float(raw: Any, path: str) -> float:
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        try:
            number = float(raw)
        except (ValueError, OverflowError):
            number = math.nan if isinstance(raw, str) else math.inf
        if math.isfinite(number):
            return number
        if not isinstance(raw, str) or raw.strip(".+-").lower() in ("nan", "inf", "infinity"):
            raise UserError(f"`{path}` must be a finite number, but is {show(raw)}")
    raise UserError(f"`{path}` must be a number, but is {show(raw)}")


def _decode_str(raw: Any, path: str) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return yaml_text.written(raw)
    quotes = " (put it in quotes)" if isinstance(raw, bool) else ""
    raise UserError(f"`{path}` must be text, but is {show(raw)}{quotes}")


def _decode_path(raw: Any, path: str) -> Path:
    return Path(_decode_str(raw, path))


TEXTS = (str, Text, Path)
SCALARS = {
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
    **dict.fromkeys((str, Text), _decode_str),
    Path: _decode_path,
}
