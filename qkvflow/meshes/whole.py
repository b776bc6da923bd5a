"""Which large arrays every device holds in full: arguments by their sharding, others by their shape in the program.

A temporary array counts as whole if a device's array has the sizes, in any order, of an array of the program before
sharding. This finds weights and gradients, but also sizes that agree by chance.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from haliax import NamedArray

from qkvflow.meshes.hlo import Program
from qkvflow.named import is_named

LARGE = 1 << 20  # bytes
# Instructions that create no new array.
_NO_ARRAY = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant"}


@dataclass(frozen=True)
class Whole:
    """
    Attributes:
        name: path of an argument; for other arrays their origin, as JAX names it.
        sizes, bytes: of one copy.
        times: how often a step creates it; 0 for an argument, which persists.
    """

    name: str
    sizes: tuple[int, ...]
    bytes: int
    times: float


def whole_arguments(state: Any, large: int = LARGE) -> list[Whole]:
    """Unsharded arrays of the training state, given as shapes with shardings; the largest first."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_named):
        array: Any = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not isinstance(array, jax.ShapeDtypeStruct) or array.sharding is None:
            continue
        size = prod(array.shape) * array.dtype.itemsize if hasattr(array.dtype, "itemsize") else 0
        is_divided = array.sharding.shard_shape(array.shape) != array.shape
        if size > large and not is_divided and array.sharding.num_devices > 1:
            found.append(Whole(jax.tree_util.keystr(path), array.shape, size, 0.0))
    return sorted(found, key=lambda w: -w.bytes)


def whole_temporaries(program: Program, undivided: str, large: int = LARGE) -> list[Whole]:
    """Unsharded arrays that the step creates, one entry per shape and origin; the largest first.

    Args:
        undivided: the text of the lowered program (`jax.stages.Lowered.as_text()`).
    """
    known = _sizes(undivided)
    found: dict[tuple, Whole] = {}
    for i in program.instructions():
        if not i.is_stored or i.op in _NO_ARRAY:
            continue
        for array in i.results:
            sizes = tuple(n for n in array.sizes if n != 1)
            if array.bytes > large and tuple(sorted(sizes)) in known:
                key = (tuple(sorted(sizes)), i.times)
                if key not in found:
                    found[key] = Whole(i.source or i.name, array.sizes, array.bytes, i.times)
    return sorted(found.values(), key=lambda w: -w.bytes)


def _sizes(lowered: str) -> set[tuple[int, ...]]:
    """Sorted sizes, without ones, of all arrays outside manually sharded regions (`shard_map`)."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in lowered.splitlines():
        function = re.match(r"\s*func\.func .*?@([\w.\-]+)\(", line)
        name = function[1] if function else name
        bodies.setdefault(name, []).append(line)
    found: set[tuple[int, ...]] = set()
    waiting, seen = ["main"], {"main"}
    while waiting:
        for line in _outside_of_manual(bodies.get(waiting.pop(), [])):
            for sizes in re.findall(r"tensor<((?:\d+x)+)", line):
                found.add(tuple(sorted(int(n) for n in sizes.split("x") if n not in ("", "1"))))
            called = set(re.findall(r"\bcall @([\w.\-]+)\(", line)) - seen
            seen |= called
            waiting += called
    return found


def _outside_of_manual(lines: list[str]) -> Iterator[str]:
    """Lines outside manually sharded regions: inside, shapes are those of one device."""
    depth = 0
    for line in lines:
        if "sdy.manual_computation" in line or depth:
            depth += line.count("{") - line.count("}")
        else:
            yield line
