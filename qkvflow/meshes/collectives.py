"""What devices send each other in a compiled step: kind, number, bytes and mesh axes of collectives."""

import re
from dataclasses import dataclass

from qkvflow.meshes.groups import axes_of, first_group
from qkvflow.meshes.hlo import Instruction, Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Collective:
    """
    Attributes:
        kind: as XLA names it.
        count: executions per step.
        bytes: summed over executions: each counts the larger of a device's input and output.
        axes: mesh axes along which the devices lie; empty if unknown.
        sent: bytes that a device sends, with the best algorithm: (g-1)/g of `bytes` in a group of g, twice that for an
            all-reduce.
        devices: per group; 0 if unknown.
        machines: number of machines with devices of a group; 1 if not computed.
    """

    kind: str
    count: float
    bytes: float
    axes: str = ""
    sent: float = 0.0
    devices: int = 0
    machines: int = 1


def collectives(
    program: Program, mesh: dict[str, int] | None = None, machine: list[int] | None = None
) -> list[Collective]:
    """The collectives of one step on one device, the largest sum first; those within a single device are left out.

    Args:
        mesh: axis -> size, all axes, in the order of the devices.
        machine: for each device of the mesh, the machine that contains it.
    """
    sums: dict[tuple[str, str, int, int], list[float]] = {}
    seen: set[tuple[str, float]] = set()
    for name, found in program.computations.items():
        shapes = {i.name: i.results for i in found}
        for i in found:
            kind = i.op.removesuffix("-start")
            if kind not in KINDS:
                continue
            group = first_group(i, None if machine is None else len(machine))
            channel = re.search(r"channel_id=(\d+)", i.rest)
            # On a TPU one collective can continue through several fusions, and the text repeats it in each.
            again = (channel[1], i.times) if channel and "async_collective_fusion" in name else None
            if (group is not None and len(group) == 1) or (again is not None and again in seen):
                continue
            seen |= set() if again is None else {again}
            # A TPU's reduce-scatter is a fusion of that name around an all-reduce.
            kind = "reduce-scatter" if kind == "all-reduce" and name.startswith("all-reduce-scatter") else kind
            size = _bytes(i, shapes)
            machines = 1 if machine is None or group is None else len({machine[d] for d in group if d < len(machine)})
            axes = axes_of(group, mesh) if mesh and group else ""
            total = sums.setdefault((kind, axes, len(group or ()), machines), [0.0, 0.0, 0.0])
            total[0] += i.times
            total[1] += i.times * size
            total[2] += i.times * _sent(kind, size, len(group) if group else None)
    found_all = (Collective(k, n, b, axes, sent, *who) for (k, axes, *who), (n, b, sent) in sums.items())
    return sorted(found_all, key=lambda c: -c.bytes)


def _bytes(i: Instruction, shapes: dict) -> int:
    given = sum(a.bytes for name in i.operands for a in shapes.get(name, ()))
    taken = sum(a.bytes for a in i.results)
    if i.op.endswith("-start") and taken > given:
        taken -= given  # its output type includes its operands
    return max(given, taken)


def _sent(kind: str, size: float, devices: int | None) -> float:
    share = 1.0 if devices is None or kind in ("collective-permute", "collective-broadcast") else 1 - 1 / devices
    return size * share * (2 if kind == "all-reduce" else 1)
