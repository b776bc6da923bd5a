"""From nested dictionaries to typed configuration objects, with an error message for every invalid input.

Differs from Levanter, which decodes by `draccus.decode`: draccus names no choices, loses the path inside
some classes, hides the message of a class's own checks, and turns `true` into the text `'True'` where both
would fit. The rules for well-formed input are draccus's own, and types that are registered with draccus
(precision policies, time spans, checkpoint policies) are decoded by it.
"""

import collections.abc
import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import draccus
from draccus.utils import is_choice_type

from qkvflow.config.levanter_ranges import LEVANTER
from qkvflow.config.scalars import LISTS, SCALARS, TEXTS, Keys, Typed, describe, is_mapping, show
from qkvflow.config.yaml_text import plain, written
from qkvflow.errors import UserError, first_line, shortened
from qkvflow.inside.draccus import registered
from qkvflow.ranges import field_out_of_range

T = TypeVar("T")
_MISSING = dataclasses.MISSING


def decode(cls: type[T], raw: Any, path: str = "") -> T:
    """Decodes plain data (as YAML gives it) into `cls`.

    Args:
        cls: a dataclass, a choice class (`type: NAME` picks the subclass), or any annotation of their fields.
        raw: dictionaries, lists and scalars, and values of the command line (`Typed`).
        path: dotted key of `raw`, for messages.

    Raises:
        UserError: names the dotted key, what was found and what is possible.
    """
    if isinstance(raw, Typed):
        return _decode_typed(cls, raw, path)
    origin = typing.get_origin(cls) or cls
    if cls is Any or isinstance(cls, TypeVar):
        return _anything(raw)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(cls, raw, path)
    if origin is typing.Literal:
        options = typing.get_args(cls)
        return raw if isinstance(raw, Hashable) and raw in options else _refuse_choice(path, raw, [*map(str, options)])
    if isinstance(origin, type) and is_choice_type(origin):
        return _decode_choice(origin, raw, path)
    if origin is Keys:
        return Keys(raw) if isinstance(raw, Mapping) else _decode_container(dict, dict, raw, path)
    if origin in SCALARS:
        return SCALARS[origin](raw, path)
    if draccus.decode.dispatch(origin) is not None:  # registered by Levanter or draccus
        try:
            if raw is None:
                raise ValueError("it is empty")
            return draccus.decode(origin, plain(raw))
        except Exception as error:
            raise UserError(
                f"`{path}` must be {describe(cls)}, but is {show(raw)} ({first_line(error, 500)})"
            ) from None
    if dataclasses.is_dataclass(origin):
        return _decode_dataclass(origin, raw, path)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        by_name = {**{m.name: m for m in origin}, **{m.value: m for m in origin}}
        return (
            by_name[raw]
            if isinstance(raw, Hashable) and raw in by_name
            else _refuse_choice(path, raw, [str(m.value) for m in origin])
        )
    return _decode_container(cls, origin, raw, path)


def choice_name(cls: type) -> str | None:
    """The name that stands for a class in the key `type`; None if it is no choice of anything."""
    return next((name for name, choice in registered(cls).items() if choice is cls), None)


def _decode_dataclass(cls: type, raw: Any, path: str, note: str = "") -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"`{path}` must be a mapping of keys to values, but is {show(raw)}")
    if "type" in raw and _text(raw["type"]) == choice_name(cls):  # said again, where only this choice is possible
        raw = {key: value for key, value in raw.items() if key != "type"}
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in raw:
        if key not in fields:
            _refuse_key(path, written(key), list(fields), note, _types_with(cls, key))
    values = {}
    for name, field in fields.items():
        if name in raw:
            # Some of Levanter's fields have None as default without saying so in their type.
            is_default_none = _is_null(raw[name]) and field.default is None
            values[name] = None if is_default_none else decode(hints[name], raw[name], _join(path, name))
        elif field.default is _MISSING and field.default_factory is _MISSING:
            hint = "" if path or raw else " (give a file with --config_path FILE)"
            raise UserError(f"the key `{_join(path, name)}` is missing{note}; it is required{hint}")
    outside = field_out_of_range(cls, values, LEVANTER, path)
    if outside is not None:
        raise UserError(outside)
    try:
        return cls(**values)
    except KeyError as error:  # one of Levanter's own checks
        raise UserError(f"`{path}`{note}: the key `{error.args[0]}` is missing in a part of it") from error
    except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
        where = f"`{path}`{note}: " if path else ""
        raise UserError(f"{where}{first_line(error, 500) if not isinstance(error, UserError) else error}") from error


def _decode_choice(cls: Any, raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"`{path}` must be a mapping with a key `type`, but is {show(raw)}")
    name = _text(raw.get("type", cls.default_choice_name()))
    if name is None:
        raise UserError(f"the key `{_join(path, 'type')}` is missing; choices: {_choices(cls)}")
    if not isinstance(name, str):
        _refuse_choice(_join(path, "type"), name, sorted(cls.get_known_choices()))
    # Asking the registry first spares the import of every module where choices could be registered.
    subclass = registered(cls).get(name)
    if subclass is None:
        try:
            subclass = cls.get_choice_class(name)
        except KeyError:
            _refuse_choice(_join(path, "type"), name, sorted(cls.get_known_choices()))
    rest = {key: value for key, value in raw.items() if key != "type"}
    return _decode_dataclass(subclass, rest, path, f" (type {name})")


def _decode_union(cls: Any, raw: Any, path: str) -> Any:
    options = [arg for arg in typing.get_args(cls) if arg is not type(None)]
    if raw is None and len(options) < len(typing.get_args(cls)):
        return None
    fitting = [option for option in options if _fits(option, raw)]
    if len(options) == 1:
        fitting = options
    elif isinstance(raw, Mapping):
        fitting = _of_its_keys(fitting, raw)
    # The value's own type first; but a quoted number is a number where one may stand.
    fitting.sort(key=lambda option: (option in TEXTS, not _is_of(raw, option)))
    failure = None
    for option in fitting:
        try:
            return decode(option, raw, path)
        except UserError as error:
            failure = failure or error
    if failure is not None and len(fitting) == 1:
        raise failure
    raise UserError(f"`{path}` must be {describe(cls)}, but is {show(raw)}")


def _of_its_keys(options: list, raw: Mapping) -> list:
    """The options, but of those that are records the one alone that has the most of the mapping's keys.

    So a mistake inside it is told as what it is, not as a value that is none of the options.
    """
    names = {option: _names(option) for option in options if dataclasses.is_dataclass(option)}
    keys = [written(key) for key in raw]

    def known(option: Any) -> tuple[int, bool, int]:
        near = [key for key in keys if difflib.get_close_matches(key, names[option], n=1)]
        exact = sum(key in names[option] for key in keys)
        return exact, exact > 0 and set(keys) >= _required(option), len(near)

    best = max(names, key=known, default=None)
    if len(names) < 2 or known(best) == (0, False, 0):
        return options
    return [option for option in options if option is best or option not in names]


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _required(cls: Any) -> set[str]:
    """The fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    fields = (f for f in dataclasses.fields(cls) if f.init)
    return {f.name for f in fields if f.default is missing and f.default_factory is missing}


def _listed(raw: Typed) -> Any:
    """`1,2,3` as `[1,2,3]`, where only a list may stand; what YAML cannot read so, such as `*.txt`, as it is typed."""
    try:
        return Typed(f"[{raw.text}]", raw.where).value
    except UserError:
        parts = [part.strip() for part in raw.text.split(",")]
        if not all(parts):
            raise
        return [Typed(part, raw.where) for part in parts]


def _decode_typed(cls: Any, raw: Typed, path: str) -> Any:
    """A value of the command line: as typed where text may stand, unless it is something else that may stand there."""
    is_union = typing.get_origin(cls) in (typing.Union, types.UnionType)
    options = typing.get_args(cls) if is_union else (cls,)
    texts = [option for option in options if option in TEXTS]
    if not texts:
        origins = {typing.get_origin(option) or option for option in options} - {type(None)}
        if origins <= set(LISTS) and not isinstance(raw.value, list | dict | None):
            return decode(cls, _listed(raw), path)
        return decode(cls, raw.value, path)
    try:
        value = raw.value
    except UserError:
        value = raw.as_text
    if value is None and type(None) in options:
        return None
    others = tuple(option for option in options if option not in TEXTS and option is not type(None))
    if not isinstance(value, str) and any(_fits(option, value) for option in others):
        try:
            return decode(typing.Union[others], value, path)  # noqa: UP007 (of a tuple)
        except UserError:
            if isinstance(value, dict | list):
                raise
    return decode(texts[0], raw.as_text, path)


def _anything(raw: Any) -> Any:
    """Plain data; values of the command line as YAML reads them, at any depth."""
    if isinstance(raw, Typed):
        return _anything(raw.value)
    if isinstance(raw, dict):
        return {plain(key): _anything(value) for key, value in raw.items()}
    return [_anything(item) for item in raw] if isinstance(raw, list) else plain(raw)


def _text(raw: Any) -> Any:
    """A name: what was typed for it, if it was typed."""
    return raw.as_text if isinstance(raw, Typed) else raw


def _is_null(raw: Any) -> bool:
    return raw is None or (isinstance(raw, Typed) and raw.text == "null")


def _is_of(raw: Any, option: Any) -> bool:
    origin = typing.get_origin(option) or option
    return isinstance(origin, type) and isinstance(raw, origin) and (origin is bool) == isinstance(raw, bool)


def _fits(option: Any, raw: Any) -> bool:
    """Whether the shape of the raw value (mapping, list, scalar) can belong to the type at all."""
    origin = typing.get_origin(option) or option
    is_record = isinstance(origin, type) and (is_choice_type(origin) or dataclasses.is_dataclass(origin))
    if draccus.decode.dispatch(origin) is not None and origin not in SCALARS:
        return True
    if isinstance(raw, Mapping):
        return is_record or is_mapping(origin)
    if isinstance(raw, list):
        return origin in LISTS
    return not is_record and not is_mapping(origin) and origin not in LISTS


def _decode_container(cls: Any, origin: Any, raw: Any, path: str) -> Any:
    args = typing.get_args(cls)
    if is_mapping(origin):
        if not isinstance(raw, Mapping):
            raise UserError(f"`{path}` must be a mapping of keys to values, but is {show(raw)}")
        key_type, value_type = args if len(args) == 2 else (str, Any)
        return {
            written(key) if key_type in (str, Any) else decode(key_type, key, path): decode(
                value_type, value, _join(path, written(key))
            )
            for key, value in raw.items()
        }
    if origin in LISTS:
        if not isinstance(raw, list | tuple):
            raise UserError(f"`{path}` must be a list, but is {show(raw)}")
        if origin is tuple and args and Ellipsis not in args:
            if len(args) != len(raw):
                raise UserError(f"`{path}` must be a list of {len(args)} items, but has {len(raw)}")
            item_types = args
        else:
            item_types = (args[0] if args else Any,) * len(raw)
        items = [decode(t, item, f"{path}[{i}]") for i, (t, item) in enumerate(zip(item_types, raw, strict=True))]
        return list(items) if origin is collections.abc.Sequence else origin(items)
    raise UserError(f"`{path}` cannot be set from a file or a command line (its type is {describe(cls)})")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _choices(cls: Any) -> str:
    return ", ".join(sorted(cls.get_known_choices()))


def _types_with(cls: type, key: Any) -> list[str]:
    """The other choices in place of a class that have a key of this name."""
    choices = {name: c for name, c in registered(cls).items() if c is not cls and dataclasses.is_dataclass(c)}
    return sorted(name for name, c in choices.items() if key in {field.name for field in dataclasses.fields(c)})


def _refuse_key(path: str, key: str, valid: list[str], note: str, types_with: list[str]) -> typing.NoReturn:
    key = shortened(key)
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f", did you mean `{_join(path, near[0])}`?" if near else "."
    if path and types_with and note:
        hint += (
            f" It is a key of type {', '.join(types_with)}: if you override only the type, the section keeps the other"
            f" keys from the file. Give the whole section: --{path} '{{type:"
            f" {note.removeprefix(' (type ').removesuffix(')')}}}'."
        )
    where = f"`{path}`{note}" if path else "the top level"
    raise UserError(f"unknown key `{_join(path, key)}`{hint} Keys of {where}: {', '.join(valid)}")


def _refuse_choice(path: str, value: Any, choices: list[str]) -> typing.NoReturn:
    near = difflib.get_close_matches(shortened(str(value)), choices, n=1)
    hint = f", did you mean `{near[0]}`?" if near else "."
    raise UserError(f"`{path}`: unknown choice {show(value)}{hint} Choices: {', '.join(choices)}")
