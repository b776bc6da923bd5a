"""Ranges of numbers, which belong to the type of a field: `steps: Count = 6`, `dropout: Annotated[float, Range(...)]`.

`out_of_range` finds the first number in a configuration that is out of its range. `qkvflow.config.decode` looks, and
training looks once more, for configurations that were made in Python.
"""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from qkvflow.errors import UserError


@dataclass(frozen=True)
class Range:
    """Numbers from `at_least`, or above `above`, to `at_most`, or below `below`; None is no limit.

    NaN and infinity are in none.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            is_finite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        limits = ((field.name.replace("_", " "), getattr(self, field.name)) for field in dataclasses.fields(self))
        return " and ".join(f"{name} {limit:g}" for name, limit in limits if limit is not None) or "finite"


def is_finite(number: float) -> bool:
    """Whether it is neither NaN nor infinite, like what is no number; `math.isfinite` fails for integers beyond all
    floats."""
    return isinstance(number, numbers.Integral) or not isinstance(number, numbers.Real) or math.isfinite(number)


Count = Annotated[int, Range(at_least=1)]
"""How many; one or more."""
Steps = Annotated[int, Range(at_least=1, at_most=2**16)]
"""Steps of a solver in depth. With more, what their sum loses in fp32 (2^-24 a step) outweighs what it gains."""
NotNegative = Annotated[float, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
ProperShare = Annotated[float, Range(at_least=0, below=1)]
"""Such as a dropout, which leaves something."""


Table = Mapping[type, Mapping[str, Range]]


def out_of_range(value: Any, table: Table | None = None, path: str = "") -> str | None:
    """What is wrong with the first number in a dataclass, or in those that it holds, that is out of its range, or not
    whole where it must be; or None.

    Args:
        table: ranges of fields of classes that are not ours; a class has those of its bases too.
        path: dotted key of `value`.
    """
    values = {name: getattr(value, name, None) for name in field_types(type(value))}
    return field_out_of_range(type(value), values, table, path)


def field_out_of_range(cls: type, values: Mapping[str, Any], table: Table | None = None, path: str = "") -> str | None:
    """The same for values that fields of a dataclass are to have."""
    for name, value in values.items():
        hint, place = field_types(cls)[name], f"{path}.{name}" if path else name
        limits, kinds = [*_ranges(hint), *_foreign(cls, name, table or {})], _kinds(hint)
        if _is_whole(hint) and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            return _not_whole(place, value)
        for where, part in _parts(value, place):
            if isinstance(part, float) and kinds == {int}:
                return _not_whole(where, part)
            is_group = dataclasses.is_dataclass(part)
            found = out_of_range(part, table, where) if is_group else _wrong(where, part, limits)
            if found is not None:
                return found
    return None


def check_range(name: str, number: float, hint: Any) -> None:
    """Checks one number against the ranges in a type.

    Raises:
        UserError: it is out of them.
    """
    wrong = _wrong(name, number, _ranges(hint))
    if wrong is not None:
        raise UserError(wrong)


def check_ranges(value: Any, table: Table | None = None) -> None:
    """For `__post_init__` of a class that is made in Python too, and for configurations that no program has read.

    Raises:
        UserError: a number is out of its range.
    """
    wrong = out_of_range(value, table)
    if wrong is not None:
        raise UserError(wrong)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, their ranges with them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _wrong(name: str, number: float, limits: list[Range]) -> str | None:
    wrong = next((limit for limit in limits if number not in limit), None)
    return wrong and f"`{name}` must be {wrong if is_finite(number) else 'finite'}, but is {number!r}"


def _not_whole(name: str, value: Any) -> str:
    return f"`{name}` must be a whole number, but is {value!r}"


def _is_whole(hint: Any) -> bool:
    """Whether a field holds one whole number with a range, and nothing else."""
    return typing.get_origin(hint) is Annotated and typing.get_args(hint)[0] is int


def _kinds(hint: Any) -> set[type]:
    """The types of the numbers in a type."""
    if typing.get_origin(hint) is Annotated:
        return _kinds(typing.get_args(hint)[0])
    if hint in (int, float):
        return {hint}
    return {kind for part in typing.get_args(hint) for kind in _kinds(part)}


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The numbers and dataclasses that a value is or holds, with their dotted keys."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _parts(part, f"{path}[{index}]")
    # numbers.Real has NumPy's numbers, too.
    elif not isinstance(value, bool | type) and (isinstance(value, numbers.Real) or dataclasses.is_dataclass(value)):
        yield path, value


def _ranges(hint: Any) -> list[Range]:
    """The ranges in a type; of a union or a list, those of its parts, which all its numbers must keep."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return [limit for limit in typing.get_args(hint)[1:] if isinstance(limit, Range)]
    if origin in (typing.Union, types.UnionType, list, tuple, dict, Mapping):
        return [limit for part in typing.get_args(hint) for limit in _ranges(part)]
    return []


def _foreign(cls: type, name: str, table: Table) -> list[Range]:
    return [table[base][name] for base in cls.__mro__ if base in table and name in table[base]]
