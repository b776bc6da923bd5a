"""From nested dictionaries to typed configuration objects, with an error message for every mistake.

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

from qkvflow.cli.scalars import LISTS, SCALARS, describe, is_mapping, show
from qkvflow.errors import UserError

T = TypeVar("T")
_MISSING = dataclasses.MISSING


def decode(cls: type[T], raw: Any, path: str = "") -> T:
    """Decodes plain data (as YAML gives it) into `cls`.

    Args:
        cls: a dataclass, a choice class (`type: NAME` picks the subclass), or any annotation of their fields.
        raw: dictionaries, lists and scalars.
        path: dotted key of `raw`, for messages.

    Errors: `UserError` that names the dotted key, what was found and what is possible.
    """
    origin = typing.get_origin(cls) or cls
    if cls is Any or isinstance(cls, TypeVar):
        return raw
    if origin in (typing.Union, types.UnionType):
        return _decode_union(cls, raw, path)
    if origin is typing.Literal:
        options = typing.get_args(cls)
        return raw if raw in options else _refuse_choice(path, raw, [str(o) for o in options])
    if isinstance(origin, type) and is_choice_type(origin):
        return _decode_choice(origin, raw, path)
    if origin in SCALARS:
        return SCALARS[origin](raw, path)
    if draccus.decode.dispatch(origin) is not None:  # registered by Levanter or draccus
        try:
            if raw is None:
                raise ValueError("it is empty")
            return draccus.decode(origin, raw)
        except Exception as error:
            raise UserError(f"`{path}` must be {describe(cls)}, but is {show(raw)} ({_first_line(error)})") from None
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
    registry = getattr(cls, "_choice_registry", {})
    return next((name for name, choice in registry.items() if choice is cls), None)


def _decode_dataclass(cls: type, raw: Any, path: str, note: str = "") -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"`{path}` must be a mapping of keys to values, but is {show(raw)}")
    if "type" in raw and raw["type"] == choice_name(cls):  # said again, where only this choice is possible
        raw = {key: value for key, value in raw.items() if key != "type"}
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in raw:
        if key not in fields:
            _refuse_key(path, str(key), list(fields), note)
    values = {}
    for name, field in fields.items():
        if name in raw:
            # Some of Levanter's fields have None as default without saying so in their type.
            is_default_none = raw[name] is None and field.default is None
            values[name] = None if is_default_none else decode(hints[name], raw[name], _join(path, name))
        elif field.default is _MISSING and field.default_factory is _MISSING:
            hint = "" if path or raw else " (give a file with --config_path FILE)"
            raise UserError(f"the key `{_join(path, name)}` is missing{note}; it must be given{hint}")
    try:
        return cls(**values)
    except (TypeError, ValueError, AssertionError) as error:
        where = f"`{path}`{note}: " if path else ""
        raise UserError(f"{where}{_first_line(error) if not isinstance(error, UserError) else error}") from error


def _decode_choice(cls: Any, raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"`{path}` must be a mapping with a key `type`, but is {show(raw)}")
    name = raw.get("type", cls.default_choice_name())
    if name is None:
        raise UserError(f"the key `{_join(path, 'type')}` is missing; choices: {_choices(cls)}")
    if not isinstance(name, str):
        _refuse_choice(_join(path, "type"), name, sorted(cls.get_known_choices()))
    # Asking the registry first spares the import of every module where choices could be registered.
    subclass = cls._choice_registry.get(name)
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
    # The value's own type first; but `1e-3`, which YAML reads as text, is a number where a number may stand.
    fitting.sort(key=lambda option: (option is str, option is not type(raw)))
    failure = None
    for option in fitting:
        try:
            return decode(option, raw, path)
        except UserError as error:
            failure = failure or error
    if failure is not None and len(fitting) == 1:
        raise failure
    raise UserError(f"`{path}` must be {describe(cls)}, but is {show(raw)}")


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
        value_type = args[1] if len(args) == 2 else Any
        return {str(key): decode(value_type, value, _join(path, str(key))) for key, value in raw.items()}
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


def _refuse_key(path: str, key: str, valid: list[str], note: str) -> typing.NoReturn:
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f", did you mean `{_join(path, near[0])}`?" if near else "."
    where = f"`{path}`{note}" if path else "the top level"
    raise UserError(f"unknown key `{_join(path, key)}`{hint} Keys of {where}: {', '.join(valid)}")


def _refuse_choice(path: str, value: Any, choices: list[str]) -> typing.NoReturn:
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f", did you mean `{near[0]}`?" if near else "."
    raise UserError(f"`{path}`: unknown choice {value!r}{hint} Choices: {', '.join(choices)}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
