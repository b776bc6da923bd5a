"""YAML text to plain data and back, by the schema of YAML 1.2: numbers are decimal; `yes`, `12:30`, `0x1F` are text.

Differs from PyYAML, which reads YAML 1.1, where `010` is 8, `12:30` is 750, `1_000` is 1000 and `2024-01-01` a date. A
number remembers how it was written, because the field that it is for may be text: `id: 007` is not the name `7`.
"""

import re
from typing import Any, ClassVar

import yaml

from qkvflow.errors import UserError, shortened

_LONGEST_NUMBER = 400  # characters: what is longer is no number that anything here can be
_LARGEST_TREE = 1_000_000  # values, with those that aliases stand for: a few nested aliases can stand for billions
_PREFIX = "tag:yaml.org,2002:"
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


class WrittenInt(int):
    """An integer that was not written as Python writes it; `text` is what stood there."""

    text: str


class WrittenFloat(float):
    """The same for a number with a fraction or exponent."""

    text: str


def load(text: str, where: str) -> Any:
    """What YAML text says, with numbers that remember how they were written.

    Args:
        where: the text comes from, for messages: `the file a.yaml`.

    Raises:
        UserError: it is no valid YAML, or too much of it.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _LARGEST_TREE:
            raise UserError(f"{where} contains more than {_LARGEST_TREE:,} values when its aliases are expanded")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(
            f"{where} is not valid YAML{place}: {shortened(error.problem or error.context or '')}"
        ) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
        raise UserError(
            f"{where} is not valid YAML, {place}: it contains the character U+{ord(text[error.position]):04X}, which is"
            " no text. Remove it"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {shortened(str(error))}") from None
    except RecursionError:
        raise UserError(f"{where} is not accepted: its brackets are nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def dump(tree: Any) -> str:
    """Plain data as YAML that `load` reads back, and readers of YAML 1.1 too."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def plain(raw: Any) -> Any:
    """The same data in Python's own types."""
    if isinstance(raw, dict):
        return {plain(key): plain(value) for key, value in raw.items()}
    if isinstance(raw, list):
        return [plain(item) for item in raw]
    if isinstance(raw, WrittenInt):
        return int(raw)
    return float(raw) if isinstance(raw, WrittenFloat) else raw


def written(raw: Any) -> str:
    """A scalar as it was written."""
    return raw.text if isinstance(raw, WrittenInt | WrittenFloat) else str(raw)


class _Loader(yaml.SafeLoader):
    """The core schema. Refuses a key that stands twice, of which YAML would silently keep the last, and other tags."""

    yaml_implicit_resolvers: ClassVar[dict] = {}
    yaml_constructors: ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            # Keys that `<<: *anchor` brings in may be overridden; only written keys count.
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != f"{_PREFIX}merge":
                key = self.construct_object(key_node)
                if key in seen:
                    raise _refusal(key_node, f"the key `{shortened(key_node.value)}` appears twice")
                seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def refuse_tag(self, node: yaml.Node) -> Any:
        raise _refusal(node, f"the tag `{shortened(node.tag.replace(_PREFIX, '!!'))}` is not supported")


class _Dumper(yaml.SafeDumper):
    """PyYAML's, which also quotes text that only YAML 1.2 would read as a number, such as `1e3`."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Differs from PyYAML, which writes U+0085 as it is, and reads it as the end of a line."""
        return self.represent_scalar(f"{_PREFIX}str", data, style='"' if "\x85" in data else None)


def _number(kind: type, made: type, loader: _Loader, node: yaml.ScalarNode) -> Any:
    text = loader.construct_scalar(node)
    name = "an integer" if kind is int else "a number"
    if not re.fullmatch(_SCALARS["int" if kind is int else "float"][0], text):
        raise _refusal(node, f"`{shortened(text)}` is not {name}")
    if len(text) > _LONGEST_NUMBER:
        return text
    # Python writes infinity and NaN without the point.
    number = kind(text.replace(".", "") if text.lower().endswith(("inf", "nan")) else text)
    if str(number) == text:
        return number
    remembering = made(number)
    remembering.text = text
    return remembering


def _bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node).lower()
    if text not in ("true", "false"):
        raise _refusal(node, f"`{shortened(text)}` is neither true nor false")
    return text == "true"


def _null(loader: _Loader, node: yaml.ScalarNode) -> None:
    text = loader.construct_scalar(node)
    if text.lower() not in ("", "~", "null"):
        raise _refusal(node, f"`{shortened(text)}` is not null")


def _refusal(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Values below a node and the node itself, aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = _LARGEST_TREE + 1  # of a node that contains itself
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _name, re.compile(f"(?:{_pattern})\\Z"), list(_first))
_Loader.add_constructor(f"{_PREFIX}null", _null)
_Loader.add_constructor(f"{_PREFIX}bool", _bool)
_Loader.add_constructor(f"{_PREFIX}int", lambda loader, node: _number(int, WrittenInt, loader, node))
_Loader.add_constructor(f"{_PREFIX}float", lambda loader, node: _number(float, WrittenFloat, loader, node))
_Loader.add_constructor(f"{_PREFIX}str", yaml.SafeLoader.construct_yaml_str)
_Loader.add_constructor(f"{_PREFIX}seq", yaml.SafeLoader.construct_yaml_seq)
_Loader.add_constructor(f"{_PREFIX}map", yaml.SafeLoader.construct_yaml_map)
_Loader.add_constructor(None, _Loader.refuse_tag)
_Dumper.add_representer(str, _Dumper.represent_str)
