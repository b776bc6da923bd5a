"""The `--help` text of a configuration's keys: one line each, from docstrings of dataclasses, with defaults."""

import ast
import dataclasses
import difflib
import enum
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from draccus.utils import is_choice_type

from qkvflow.config import encode
from qkvflow.config.scalars import LISTS, Text, is_mapping
from qkvflow.errors import UserError, shortened
from qkvflow.inside.draccus import registered

_WIDTH = 118
_FLAGS = 32  # characters of the column of flags
_LONGEST_DEFAULT = 40


def key_table(config_class: type, prefix: str = "") -> str:
    """The keys of a dataclass, as `--key VALUE`, what each is for, and its default.

    Args:
        prefix: of keys below a section, `model.`.
    """
    docs, hints = field_docs(config_class), typing.get_type_hints(config_class, include_extras=True)
    rows = []
    for field in dataclasses.fields(config_class):
        name = field.metadata.get("flag", field.name)
        if field.init and name:
            told = " ".join(part for part in (docs.get(field.name), default_of(field)) if part)
            rows.append(_row(f"--{prefix}{name} {_placeholder(hints[field.name])}", told))
    return "\n".join(rows)


def sections(config_class: type, dotted: str) -> str:
    """The keys below `dotted`, such as `model.depth`: one table for each type that may stand there.

    Raises:
        UserError: there is no such key, or it has no keys below it.
    """
    classes = [config_class]
    for at, part in enumerate(parts := dotted.removeprefix("--").split(".")):
        hints = [typing.get_type_hints(cls, include_extras=True) for cls in classes]
        found = [hint[part] for hint in hints if part in hint]
        if not found:
            names = sorted({name for cls in classes for name in _names(cls)})
            near = difflib.get_close_matches(part, names, n=1)
            meant = f"did you mean `{near[0]}`? " if near else ""
            raise UserError(
                f"`{shortened('.'.join(parts[: at + 1]))}` is not a key: {meant}The keys are {', '.join(names)}"
            )
        classes = list(dict.fromkeys(cls for hint in found for cls in _dataclasses(hint)))
        if not classes:
            raise UserError(f"`{'.'.join(parts[: at + 1])}` is a single value, without keys below it")
    own = [cls for cls in classes if cls.__module__.startswith("qkvflow")] or classes
    prefix = f"{dotted.removeprefix('--')}."
    tables = [f"{_title(dotted, cls)}\n{key_table(cls, prefix)}" for cls in own]
    others = [name for cls in classes if cls not in own and (name := _type_name(cls))]
    return (
        "\n\n".join([*tables, *([f"Other types, from Levanter: {', '.join(sorted(others))}"] if others else [])]) + "\n"
    )


def field_docs(cls: type) -> dict[str, str]:
    """One line for each field of a dataclass that says what it is.

    From the section `Attributes:` of its docstring and those of its bases; where that has none, from the text or the
    comment that stands beside the field, as Levanter writes them.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _beside_fields(base) | _attributes(base)
    return docs


def default_of(field: dataclasses.Field) -> str:
    """`[8]`, the default as YAML has it; of a section nothing, since its keys have theirs."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "(required)"
    try:
        plain = encode(value)
    except Exception:  # a type of another library that has no form in YAML
        plain = value
    if plain is None or (isinstance(plain, Mapping) and plain):
        return ""
    return f"[{shortened(_flow(plain), _LONGEST_DEFAULT)}]"


def _flow(plain: Any) -> str:
    if isinstance(plain, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(value)}" for key, value in plain.items()) + "}"
    if isinstance(plain, list | tuple):
        return "[" + ", ".join(map(_flow, plain)) + "]"
    if plain is None or isinstance(plain, bool):
        return {None: "null", True: "true", False: "false"}[plain]
    return str(plain) if plain != "" else "''"


def _row(flag: str, told: str) -> str:
    indent = " " * _FLAGS
    lines = textwrap.wrap(told, _WIDTH - _FLAGS, break_on_hyphens=False) or [""]
    first = f"  {flag}"
    first = f"{first:<{_FLAGS}}{lines[0]}" if len(first) + 2 <= _FLAGS else f"{first}\n{indent}{lines[0]}"
    return "\n".join([first.rstrip(), *(indent + line for line in lines[1:])])


def _placeholder(hint: Any) -> str:
    options = [_bare(option) for option in _options(hint)]
    names = list(dict.fromkeys(map(_one_placeholder, options)))
    return "|".join(names) if len(names) < 4 else "VALUE"


def _one_placeholder(cls: Any) -> str:
    origin = typing.get_origin(cls) or cls
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(cls)))
    if cls == list[Text]:
        return "TEXT ..."
    if isinstance(origin, type):
        if issubclass(origin, bool):
            return "true|false"
        if issubclass(origin, enum.Enum):
            return "|".join(str(member.value) for member in origin)
        if origin in (int, float):
            return "N" if origin is int else "X"
        if dataclasses.is_dataclass(origin) or is_choice_type(origin) or is_mapping(origin):
            return "{...}"
        if origin in LISTS:
            return "LIST"
        if issubclass(origin, str):
            return "TEXT"
    return "VALUE" if origin is Any else getattr(origin, "__name__", "VALUE").upper()


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _options(hint: Any) -> Iterator[Any]:
    hint = _bare(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            if option is not type(None):
                yield from _options(option)
    else:
        yield hint


def _dataclasses(hint: Any) -> Iterator[type]:
    """The dataclasses that may stand where `hint` says: of a choice all that are registered, of a list its items'."""
    for option in _options(hint):
        origin = typing.get_origin(option) or option
        if isinstance(origin, type) and is_choice_type(origin):
            yield from registered(origin).values()
        elif dataclasses.is_dataclass(origin):
            yield origin
        elif typing.get_args(option) and not is_mapping(origin):
            for inner in typing.get_args(option):
                yield from _dataclasses(inner)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _type_name(cls: type) -> str | None:
    return next((name for name, choice in registered(cls).items() if choice is cls), None)


def _title(dotted: str, cls: type) -> str:
    name = _type_name(cls)
    return f"{dotted}{f', type: {name}' if name else ''} ({cls.__module__}.{cls.__qualname__})"


def _attributes(cls: type) -> dict[str, str]:
    """`name: text` of the section `Attributes:`; what is indented further goes on."""
    _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Attributes:\n")
    section = textwrap.dedent(re.split(r"\n(?=\S)", section)[0])
    found = re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n(?:[ \t]+.*)?)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _beside_fields(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[node.target.id] = " ".join(after.value.value.split())
            elif comment := re.search(r"#\s+(.*)", lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :]):
                docs[node.target.id] = comment[1]
    return docs
