"""What devices send each other in a compiled step: kind, number and bytes of collectives."""

import re
from dataclasses import dataclass
from math import prod

from qkvflow.meshes.hlo import Instruction, Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Collective:
    """
    Attributes:
        kind: as XLA names it.
        count: executions in one step.
        bytes: summed over executions: for each the larger of what a device gives and what it gets.
    """

    kind: str
    count: float
    bytes: float


def collectives(program: Program) -> list[Collective]:
    """The collectives of one step on one device, the largest sum first; those among a single device are left out."""
    sums: dict[str, list[float]] = {}
    for found in program.computations.values():
        shapes = {i.name: i.results for i in found}
        for i in found:
            kind = i.op.removesuffix("-start")
            if kind not in KINDS or group_size(i) == 1:
                continue
            given = sum(a.bytes for name in i.operands for a in shapes.get(name, ()))
            taken = sum(a.bytes for a in i.results)
            total = sums.setdefault(kind, [0.0, 0.0])
            total[0] += i.times
            total[1] += i.times * max(given, taken)
    return sorted((Collective(kind, *total) for kind, total in sums.items()), key=lambda c: -c.bytes)


def group_size(collective: Instruction) -> int | None:
    """How many devices take part in each group of a collective; None if it is not told."""
    rest = collective.rest
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if explicit:
        return len(explicit[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest)
    if counted:
        return int(counted[1])
    by_axis = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)
    if by_axis:
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", by_axis[1])}
        # A part of an axis is written 'axis':(before)size.
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", by_axis[2])
        return prod(int(part) if part else sizes[name] for name, part in parts)
    return None
