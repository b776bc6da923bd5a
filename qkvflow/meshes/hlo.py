"""The text of a compiled XLA program as instructions, each with how often a run executes it.

The program is that of one device: shapes are its own parts of arrays. Loops with a known number of turns multiply what
is in them; the branches of a conditional share its executions evenly; other loops count once and are told.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Array:
    """The type of an array: its element type as XLA names it, and its sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * bits(self.dtype) // 8


@dataclass(frozen=True)
class Instruction:
    """
    Attributes:
        name, op: of the instruction, the latter as XLA names it (`dot`, `all-gather`, ...).
        results: its result, or the parts of it if it is a tuple.
        rest: operands and attributes, as written.
        times: executions in one run; a fraction under a conditional.
        is_stored: whether its result is an array in memory; not so within a fusion.
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
        """Where it stands in the traced program, as JAX names it; empty if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Program:
    """
    Attributes:
        computations: instructions by the computation that they stand in.
        unknown_loops: loops whose number of turns XLA does not know.
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
        # A computation stands before those that call it.
        for name in reversed(lines):
            here = computations[name] = []
            for line in lines[name]:
                match = _INSTRUCTION.match(line)
                if match is None or times[name] == 0.0:
                    continue
                result, op, rest = match[2], match[3], match[4]
                turns = _TURNS.search(rest)
                if op == "while" and turns is None:
                    unknown += 1
                for called, share in _called(rest):
                    times[called] += times[name] * share * (int(turns[1]) if op == "while" and turns else 1)
                    if name in fused or op not in ("while", "conditional", "call"):
                        fused.add(called)
                here.append(Instruction(match[1], op, _arrays(result), rest, times[name], name not in fused))
        return Program({name: found for name, found in computations.items() if found}, unknown)

    def instructions(self) -> Iterator[Instruction]:
        """All that are executed."""
        for found in self.computations.values():
            yield from found

    def matrix_flops(self) -> float:
        """Multiplications and additions in products of matrices, in one run on one device."""
        total = 0.0
        for found in self.computations.values():
            shapes = {i.name: i.results for i in found}
            for i in found:
                if i.op == "dot":
                    (left,) = shapes[i.operands[0]]
                    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
                    axes = [int(a) for a in contracted[1].split(",") if a] if contracted else []
                    total += i.times * 2.0 * prod(i.results[0].sizes) * prod(left.sizes[a] for a in axes)
        return total


def bits(dtype: str) -> int:
    """Size of an element; 0 for what is no array (tokens)."""
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
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return lines, entry


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
    return tuple(Array(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _ARRAY.findall(result))
