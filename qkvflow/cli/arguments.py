"""From a command line to one nested dictionary: the YAML file first, then `--key.subkey value`."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qkvflow.config import Typed, decode
from qkvflow.config.scalars import show, text_fields
from qkvflow.config.yaml_file import full_name, read_written
from qkvflow.config.yaml_text import plain
from qkvflow.errors import UserError, shortened

T = TypeVar("T")


def parse(config_class: type[T], argv: Sequence[str]) -> tuple[T, dict[str, Any]]:
    """Reads `--config_path FILE` and `--key.subkey value` overrides into `config_class`.

    If the class has a field `config_path`, it receives the file's path. A bare `--key` means `--key true` if the
    class has a truth value of that name.

    Returns:
        the configuration, and the nested dictionary it was made from, as plain data.

    Raises:
        UserError: anything the user can fix: an unknown flag or key, a missing file, invalid YAML, a value of the wrong
            type, a violated rule of a configuration class.
    """
    texts = text_fields(config_class)
    switches = {f.name for f in dataclasses.fields(config_class) if f.type in (bool, "bool")}  # pyright: ignore
    path, overrides = _split(argv, texts, switches)
    raw = {} if path is None else read_written(Path(path))
    for key, several in texts.items():
        values = [value for name, value in overrides if name == key]
        if several and values:
            raw[key] = values
    for index, (key, value) in enumerate(overrides):
        if not texts.get(key):
            _refuse_to_discard(key, [earlier for earlier, _ in overrides[:index]])
            _set(raw, key, value)
    if path is not None and any(field.name == "config_path" for field in dataclasses.fields(config_class)):  # pyright: ignore
        raw["config_path"] = full_name(path)
    return decode(config_class, raw), _as_read(raw)


def _split(
    argv: Sequence[str], texts: Mapping[str, bool], switches: Collection[str]
) -> tuple[str | None, list[tuple[str, str | Typed]]]:
    """Splits the words into the configuration file and the (dotted key, value) pairs; those of `texts` are plain text.
    `switches` need no value."""
    path = None
    overrides: list[tuple[str, str | Typed]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"unexpected word `{shortened(word)}`: write every option as `--key value` (see --help)")
        key, equals, value = word[2:].partition("=")
        if not equals:
            # A negative number is a value; anything else that starts with a dash is the next flag.
            is_bare = not words or (words[0].startswith("--") and words[0] != "--")
            if is_bare and key in switches:
                words.insert(0, "true")
            elif is_bare:
                raise UserError(f"the flag --{key} needs a value: `--{key} VALUE` (true or false for a switch)")
            value = words.pop(0)
        if key not in texts and not value.strip():
            raise UserError(
                f"the flag --{shortened(key)} has an empty value: is a shell variable unset? For none, write"
                f" `--{shortened(key)} null`, or leave the flag out"
            )
        if texts.get(key):  # takes several: `--text A B`
            while words and not words[0].startswith("--"):
                overrides.append((key, value))
                value = words.pop(0)
        if key in ("config_path", "config"):
            if path is not None:
                raise UserError("--config_path is given twice, but only one file can be read: remove one")
            path = value
        else:
            overrides.append((key, value if key in texts else Typed(value, f"--{shortened(key)}")))
    return path, overrides


def _refuse_to_discard(section: str, given: Sequence[str]) -> None:
    """Raises:
    UserError: a flag for `section` would undo one of the `given` ones, for a key within it.
    """
    lost = next((key for key in given if key.startswith(f"{section}.")), None)
    if lost is not None:
        raise UserError(
            f"--{section} replaces the whole section, and with it --{lost}, which stands before it: give --{section}"
            " first"
        )


def _set(raw: dict[str, Any], dotted: str, value: str | Typed) -> None:
    parts = dotted.split(".")
    if not all(parts):
        raise UserError(f"`--{shortened(dotted)}` is not a key: write `--key` or `--key.subkey`")
    node = raw
    for index, part in enumerate(parts[:-1]):
        child = node.get(part)
        if isinstance(child, Typed):  # `--model '{...}' --model.hidden_dim 8`
            child = node[part] = child.value
        if not isinstance(child, dict | None):
            parent = ".".join(parts[: index + 1])
            raise UserError(f"--{dotted}: `{parent}` is the value {show(child)} and has no keys below it")
        # A copy: what a YAML anchor brings in stands at other places too.
        node[part] = {} if child is None else dict(child)
        node = node[part]
    node[parts[-1]] = value


def _as_read(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {plain(key): _as_read(value) for key, value in raw.items()}
    if isinstance(raw, Typed):
        try:
            return plain(raw.value)
        except UserError:  # it was for a field of text
            return raw.text
    return plain(raw)
