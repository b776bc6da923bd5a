"""What processes on CPUs may run in different orders, so that they wait for each other for ever."""

import re

from qkvflow.meshes.collectives import KINDS
from qkvflow.meshes.hlo import Instruction, Program


def races(program: Program) -> list[tuple[str, str]]:
    """Pairs of a loop with collectives and a later collective that reads nothing of the loop's.

    XLA:CPU starts collectives in the order of the program (`Resource::kCollectiveCommunicator`, a "scheduling edge"
    in xla/backends/cpu/runtime/thunk_executor.cc), but counts a loop as started when its first turn is.
    """
    found = []
    for here in program.computations.values():
        needs: dict[str, set[str]] = {}
        loops: list[str] = []
        for i in here:
            needs[i.name] = {i.name}.union(*(needs.get(name, set()) for name in i.operands))
            if communicates(i, program):
                found += [(loop, i.name) for loop in loops if loop not in needs[i.name]]
                loops += [i.name] if i.op in ("while", "conditional", "call") else []
    return found


def communicates(i: Instruction, program: Program) -> bool:
    """Whether it is a collective, or contains one."""
    called = re.findall(r"%([\w.\-]+)", i.rest)
    inner = [j for name in called for j in program.computations.get(name, [])]
    return i.op in KINDS or any(communicates(j, program) for j in inner)
