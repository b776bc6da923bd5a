"""The shortest possible time of a step on a chip: its work at the chip's peak rates, all overlapping."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkvflow.meshes.chips import GPUS_PER_MACHINE, Chip
from qkvflow.meshes.collectives import Collective


@dataclass(frozen=True)
class Roofline:
    """
    Attributes:
        compute, memory, links: seconds per step for each part alone.
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """A lower bound: the longest of the three, assuming perfect overlap."""
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        """The part that determines the bound."""
        times = {"compute": self.compute, "memory": self.memory, "links": self.links}
        return max(times, key=lambda name: times[name])

    def mfu(self, model_flops: float, chip: Chip, devices: int) -> float:
        """The largest possible share of the chips' peak spent on the model's own FLOPs (`model_flops`: per step, all
        devices)."""
        return model_flops / (self.seconds * devices * chip.flops)


def roofline(chip: Chip, flops: float, fp32_flops: float, traffic: float, sent: Sequence[Collective]) -> Roofline:
    """
    Args:
        flops, fp32_flops: of matrix products on a device, and the part of them in products of fp32 arrays.
        traffic: bytes between a device and its memory.
        sent: the collectives, all of whose groups run at once.

    On GPUs, no algorithm is faster than this. Within a machine, NVLink moves what a device sends, together with its
    network adapter where a group spans machines; switches that add (`Chip.switches_add`) halve an all-reduce. Between
    machines, switches do not add: each of a group's m machines receives (m-1)/m of the bytes from the others (twice
    that in an all-reduce), through the adapters of its g = n/m devices; in an all-to-all each device sends n - g of its
    n parts through its own.
    """
    compute = (flops - fp32_flops) / chip.flops + fp32_flops / chip.flops_fp32
    if chip.platform == "gpu":
        far = sum(_between(c) for c in sent if c.machines > 1) / chip.network
        links = max(sum(_within(c, chip) for c in sent), far)
    else:
        links = sum(c.sent for c in sent) / chip.links
    return Roofline(compute, traffic / chip.bandwidth, links)


def _within(collective: Collective, chip: Chip) -> float:
    """Seconds that a GPU sends, through NVLink and, if the group spans machines, its network adapter at once."""
    rate = chip.links + (chip.network if collective.machines > 1 else 0.0)
    once = collective.kind == "all-reduce" and chip.switches_add
    return (collective.bytes if once else collective.sent) / rate


def _between(collective: Collective) -> float:
    """Bytes that a GPU receives from other machines."""
    n, per_machine = collective.devices, max(1, min(GPUS_PER_MACHINE, collective.devices // collective.machines))
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return collective.sent / per_machine
    remote = collective.sent * (n - per_machine) / (n - 1)  # of what n - 1 others send
    return remote if collective.kind == "all-to-all" else remote / per_machine
