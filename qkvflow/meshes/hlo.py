"""The text of a compiled XLA program as instructions, each with how often a run executes it.

The program is that of one device: shapes are those of its shards. Loops with a known number of iterations multiply
their contents (CPU and GPU compilers state the number; a TPU's leaves a counter that is compared with a constant); the
branches of a conditional share its executions evenly; other loops count once and are reported.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"ROOT .*\bcompare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Array:
    """The type of an array: its element type as XLA names it, its sizes, and its memory space: 0 is the device's
    memory, others are on the chip itself."""

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """
    Attributes:
        name, op: of the instruction, the latter as XLA names it (`dot`, `all-gather`, ...).
        results: its result, or the parts of a tuple.
        rest: operands and attributes, as written.
        times: executions per run; a fraction under a conditional.
        is_stored: whether its result is an array in memory; false within a fusion.
    """

    name: str
    op: str
    results: tuple[Array, ...]
    rest: str
    times: float
    is_stored: bool

    @property
    def operands(self) -> list[str]:
        """Names of the arrays that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def source(self) -> str:
        """Its origin in the traced program, as JAX names it; empty if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Program:
    """
    Attributes:
        computations: instructions grouped by computation.
        unknown_loops: number of loops whose iterations XLA does not know.
    """

    computations: dict[str, list[Instruction]]
    unknown_loops: int

    @staticmethod
    def read(text: str) -> "Program":
        """From `jax.stages.Compiled.as_text()`."""
        lines, entry = _computations(text)
        times: dict[str, float] = defaultdict(float) | {entry: 1.0}
        fused: set[str] = set()
        computations: dict[str, list[Instruction]] = {}
        unknown = 0
        for name in _callers_first(lines, entry):
            here = computations[name] = []
            for line in lines[name]:
                match = _INSTRUCTION.match(line)
                if match is None or times[name] == 0.0:
                    continue
                result, op, rest = match[2], match[3], match[4]
                turns = _turns(rest, lines[name], lines) if op == "while" else None
                if op == "while" and turns is None:
                    unknown += 1
                for called, share in _called(rest):
                    times[called] += times[name] * share * (1 if turns is None else turns)
                    if name in fused or op not in ("while", "conditional", "call"):
                        fused.add(called)
                here.append(Instruction(match[1], op, _arrays(result), rest, times[name], name not in fused))
        return Program({name: found for name, found in computations.items() if found}, unknown)

    def instructions(self) -> Iterator[Instruction]:
        """All executed instructions."""
        for found in self.computations.values():
            yield from found


def bits(dtype: str) -> int:
    """Size of an element; 0 for types that are not arrays (tokens)."""
    found = re.search(r"\d+", dtype)
    return _BITS.get(dtype) or (int(found[0]) if found else 0)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = lines.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.rstrip() == "}":
            current = None
        elif current and not line.startswith("  "):  # the attributes of a kernel can span several lines
            current[-1] += line
        elif current is not None:
            current.append(line)
    return lines, entry


def _callers_first(lines: dict[str, list[str]], entry: str) -> Iterator[str]:
    """The computations that the entry calls, directly or not, each after all its callers."""
    called = {name: {c for line in found for c, _ in _called(line) if c in lines} for name, found in lines.items()}
    reached, waiting = {entry}, [entry]
    while waiting:
        fresh = called.get(waiting.pop(), set()) - reached
        reached |= fresh
        waiting += fresh
    callers: dict[str, set[str]] = {name: set() for name in reached}
    for name in reached:
        for other in called.get(name, ()):
            callers[other].add(name)
    yield from TopologicalSorter(callers).static_order()


def _turns(rest: str, here: list[str], lines: dict[str, list[str]]) -> int | None:
    """The number of iterations of a loop; None if unknown."""
    known = _TURNS.search(rest)
    if known:
        return int(known[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", rest)
    limit = next(filter(None, map(_LIMIT.search, lines.get(condition[1], []))), None) if condition else None
    if condition is None or limit is None:
        return None
    counter, last = _definition(limit[1], lines[condition[1]]), _constant(limit[2], lines[condition[1]])
    place = re.search(r"get-tuple-element\(.*?\), index=(\d+)", counter)
    if place is None or last is None:
        return None
    body = re.search(r"\bbody=%?([\w.\-]+)", rest)
    inside = lines.get(body[1], []) if body else []
    start = _tuple_part(_definition(rest.partition(")")[0].lstrip("%"), here), int(place[1]))
    after = _tuple_part(next((line for line in inside if "ROOT " in line), ""), int(place[1]))
    # By default it counts from 0 in steps of 1, as all loops from JAX do.
    return -(((_constant(start, here) or 0) - last) // (_step(after, inside) or 1))


def _tuple_part(line: str, place: int) -> str:
    """The name of a part of a tuple, from the line that creates it; empty if there is none."""
    parts = re.findall(r"%([\w.\-]+)", line.partition(" tuple(")[2].partition(")")[0])
    return parts[place] if place < len(parts) else ""


def _step(name: str, lines: list[str]) -> int:
    """The increment of a counter at the point where it is called `name`."""
    line = _definition(name, lines)
    added = re.search(r"\b(add|copy|bitcast)\(%([\w.\-]+)(?:, %([\w.\-]+))?\)", line)
    if added is None:
        return 0
    if added[1] != "add":
        return _step(added[2], lines)
    by = _constant(added[3], lines)
    return _step(added[2], lines) + by if by is not None else _step(added[3], lines) + (_constant(added[2], lines) or 0)


def _definition(name: str, lines: list[str]) -> str:
    return next((line for line in lines if re.match(rf"\s+(?:ROOT )?%?{re.escape(name)} = ", line)), "")


def _constant(name: str, lines: list[str]) -> int | None:
    found = re.search(r"\bconstant\((-?\d+)\)", _definition(name, lines))
    return int(found[1]) if found else None


def _called(rest: str) -> Iterator[tuple[str, float]]:
    """Computations that an instruction calls, with the share of its executions that each gets."""
    either = {"true_computation", "false_computation"}
    for attribute, name in _CALLED.findall(rest):
        yield name, 0.5 if attribute in either else 1.0
    branches = _BRANCHES.search(rest)
    names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
    for name in names:
        yield name, 1.0 / len(names)


def _arrays(result: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n), int(space or 0))
        for dtype, sizes, space in _ARRAY.findall(result)
    )
