"""Configuration objects as plain data and as YAML files, and the keys in which two of them differ."""

import dataclasses
import enum
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import draccus

from qkvflow.config.decode import choice_name, decode
from qkvflow.config.yaml_file import read_written
from qkvflow.config.yaml_text import dump
from qkvflow.errors import UserError
from qkvflow.files import write_text

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars, every default filled in; `decode` reads it.

    Differs from Levanter, which uses `draccus.encode`: that loses the `type` of some nested choices and
    leaves enumerations and checkpoint policies as objects.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [encode(item) for item in value]
    if value == timedelta(0):
        return "0s"  # draccus has no words for it
    if draccus.encode.dispatch(type(value)) is not None:  # precision policies, time spans, paths, ...
        plain = draccus.encode(value)
        if isinstance(plain, str | int | float):
            return plain
    if dataclasses.is_dataclass(value):
        choice = choice_name(type(value))
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return fields if choice is None else {"type": choice, **fields}
    raise TypeError(f"{value!r} of {type(value)} has no plain form; register it with draccus.encode")


def write_config(path: Path, config: Any) -> None:
    """Writes `config` as YAML."""
    write_text(path, dump(encode(config)))


def read_config(path: Path, config_class: type[T]) -> T:
    """Reads what `write_config` wrote. Keys that only a program's own subclass of the class has are left out.

    Raises:
        UserError: the file cannot be read or does not fit the class.
    """
    known = {field.name for field in dataclasses.fields(config_class)}  # pyright: ignore
    raw = {key: value for key, value in read_written(path).items() if key in known}
    try:
        return decode(config_class, raw)
    except UserError as error:
        raise UserError(f"{path} was written by another version or edited by hand: {error}") from None


def differences(stored: Any, given: Any, free_keys: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys that differ, each with its (stored, given) value, but for those in or below `free_keys`."""
    old, new = _flatten(encode(stored)), _flatten(encode(given))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys if not _is_below(key, free_keys)}


def listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """What `differences` gave, a line each."""
    return "\n".join(f"  {key}: {_show(old)} before, {_show(new)} now" for key, (old, new) in changes.items())


def _is_below(key: str, above: Collection[str]) -> bool:
    return any(key == one or key.startswith(one + ".") for one in above)


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
