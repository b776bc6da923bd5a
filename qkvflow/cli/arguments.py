"""From a command line to one nested dictionary: the YAML file first, then `--key.subkey value`."""

import dataclasses
import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from qkvflow.cli.decode import decode
from qkvflow.cli.scalars import text_fields
from qkvflow.errors import UserError

T = TypeVar("T")


def parse(config_class: type[T], argv: Sequence[str]) -> tuple[T, dict[str, Any]]:
    """Reads `--config_path FILE` and `--key.subkey value` overrides into `config_class`.

    If the class has a field `config_path`, it receives the file's path. A bare `--key` means `--key true` if the
    class has a truth value of that name.

    Returns:
        the configuration and the nested dictionary it was made from.

    Errors: `UserError` for anything the user can mend: an unknown flag or key, a missing file, bad YAML,
    a value of the wrong type, a rule of a configuration class that does not hold.
    """
    texts = text_fields(config_class)
    switches = {f.name for f in dataclasses.fields(config_class) if f.type in (bool, "bool")}  # pyright: ignore
    path, overrides = _split(argv, texts, switches)
    raw = {} if path is None else read_yaml(Path(path))
    for key, several in texts.items():
        values = [value for name, value in overrides if name == key]
        if several and values:
            raw[key] = values
    for key, value in overrides:
        if not texts.get(key):
            _set(raw, key, value)
    if path is not None and any(field.name == "config_path" for field in dataclasses.fields(config_class)):  # pyright: ignore
        raw["config_path"] = path
    return decode(config_class, raw), raw


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, read by the safe loader (a file can never run code)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}{_near_names(path)}") from None
    except IsADirectoryError:
        files = sorted(str(p) for p in path.glob("*.yaml"))
        listing = f"; it holds {', '.join(files)}" if files else ""
        raise UserError(f"{path} is a directory, but --config_path needs a YAML file{listing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration file {path}: {error}") from None
    raw = _load_yaml(text, f"the file {path}")
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold `key: value` lines at its top level, but holds a {type(raw).__name__}")
    return raw


def _load_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where} is not valid YAML{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{where} is not valid here: its brackets are nested too deeply") from None


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that stands twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            # Keys that `<<: *anchor` brings in may be overridden; only written keys count.
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key `{key_node.value}` stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _split(
    argv: Sequence[str], texts: Mapping[str, bool], switches: Collection[str]
) -> tuple[str | None, list[tuple[str, Any]]]:
    """Splits the words into the configuration file and the (dotted key, value) pairs; those of `texts` as they are.
    `switches` need no value."""
    path = None
    overrides = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"unexpected word `{word}`: every option is written `--key value` (see --help)")
        key, equals, value = word[2:].partition("=")
        if not equals:
            # A negative number is a value; anything else that starts with a dash is the next flag.
            is_bare = not words or (words[0].startswith("--") and words[0] != "--")
            if is_bare and key in switches:
                words.insert(0, "true")
            elif is_bare:
                raise UserError(f"the flag --{key} needs a value: `--{key} VALUE` (true or false for a switch)")
            value = words.pop(0)
        if texts.get(key):  # takes several: `--text A B`
            while words and not words[0].startswith("--"):
                overrides.append((key, value))
                value = words.pop(0)
        if key in ("config_path", "config"):
            if path is not None:
                raise UserError("--config_path is given twice; one file is read")
            path = value
        else:
            overrides.append((key, value if key in texts else _scalar(key, value)))
    return path, overrides


def _scalar(key: str, text: str) -> Any:
    """A value of the command line, read as YAML: `3`, `true`, `null`, `[a, b]`, `{a: 1}`, else plain text.

    `@FILE.yaml` stands for what the file holds.
    """
    if text.startswith("@") and text.endswith((".yaml", ".yml")):
        return read_yaml(Path(text[1:]))
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        if text[:1] in "[{\"'":
            raise UserError(f"--{key}: `{text}` is not a valid YAML value: {error.problem}") from None  # pyright: ignore
        return text  # e.g. a prompt with a colon in it
    except RecursionError:
        raise UserError(f"--{key}: the brackets of its value are nested too deeply") from None


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    parts = dotted.split(".")
    if not all(parts):
        raise UserError(f"`--{dotted}` is not a key: write `--key` or `--key.subkey`")
    node = raw
    for index, part in enumerate(parts[:-1]):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        elif not isinstance(child, dict):
            parent = ".".join(parts[: index + 1])
            raise UserError(f"--{dotted}: `{parent}` is the value {child!r} there and has no keys below it")
        node = child
    node[parts[-1]] = value


def _near_names(path: Path) -> str:
    """What the user may have meant: files of the nearest existing folder, and of `configs/`."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    candidates = {str(p) for root in {folder, Path("configs")} if root.is_dir() for p in root.glob("*.yaml")}
    candidates |= {str(p) for p in Path("configs").glob("*/*.yaml")} if Path("configs").is_dir() else set()
    near = difflib.get_close_matches(str(path), sorted(candidates), n=3, cutoff=0.5)
    shown = near or sorted(candidates)[:8]
    if not shown:
        return f" (looked in {os.getcwd()})"
    return f" (looked in {os.getcwd()}); {'near names' if near else 'there is'}: {', '.join(shown)}"
