"""Which devices take part in a collective, and along which mesh axes."""

import re
from math import prod

import numpy as np

from qkvflow.meshes.hlo import Instruction


def first_group(collective: Instruction, devices: int | None = None) -> list[int] | None:
    """Indices in the mesh of the devices in the first group; None if not given.

    Args:
        devices: number of devices; without groups all take part.
    """
    rest = collective.rest
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if explicit:
        return [int(n) for n in explicit[1].split(",")]
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if counted:
        sizes = [int(n) for n in counted[3].split(",")]
        numbers = np.arange(prod(sizes)).reshape(sizes)
        if counted[4]:
            numbers = numbers.transpose([int(n) for n in counted[4].split(",")])
        return numbers.reshape(int(counted[1]), int(counted[2]))[0].tolist()
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", rest)
    if named:
        return _of_axes(named[1], named[2], named[3])
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    if pairs:
        return _cycle([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", pairs[0])])
    if "replica_groups={}" in rest and devices:
        return list(range(devices))
    return None


def axes_of(group: list[int], mesh: dict[str, int]) -> str:
    """The axes along which the devices of a group differ, joined by ` x `; `mesh` gives their order."""
    if len(group) < 2 or max(group) >= prod(mesh.values()):
        return ""
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    return " x ".join(name for name, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1)


def _of_axes(mesh: str, order: str, chosen: str) -> list[int]:
    """Parses mesh['a'=4,'b'=2] {'a'}; a part of an axis is written 'a':(before)size."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
    numbers = np.arange(prod(sizes.values()))
    given = re.search(r"\[([\d,]+)\]T\(([\d,]+)\)", order)
    if given:
        shape, turned = ([int(n) for n in part.split(",")] for part in given.groups())
        numbers = numbers.reshape(shape).transpose(turned).reshape(-1)
    split, keep = [], []
    parts = {name: (before, size) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
    for name, size in sizes.items():
        before, part = parts.get(name, ("", ""))
        if name not in parts:
            split, keep = [*split, size], [*keep, False]
        elif not part:
            split, keep = [*split, size], [*keep, True]
        else:
            split += [int(before), int(part), size // (int(before) * int(part))]
            keep += [False, True, False]
    index = tuple(slice(None) if kept else 0 for kept in keep)
    return numbers.reshape(split)[index].reshape(-1).tolist()


def _cycle(pairs: list[tuple[int, int]]) -> list[int]:
    """The devices on a permutation's cycle, starting with the first."""
    following, found = dict(pairs), []
    at: int | None = pairs[0][0] if pairs else None
    while at is not None and at not in found:
        found.append(at)
        at = following.get(at)
    return found
