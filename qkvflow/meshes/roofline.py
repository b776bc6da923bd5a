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
        sent: the collectives. Between machines, a ring of all their GPUs crosses each machine's border once per network
            adapter; each GPU has one.
    """
    compute = (flops - fp32_flops) / chip.flops + fp32_flops / chip.flops_fp32
    near = sum(c.sent for c in sent) / chip.links
    far = sum(c.sent / _adapters(c) for c in sent if c.machines > 1) / chip.network if chip.platform == "gpu" else 0.0
    return Roofline(compute, traffic / chip.bandwidth, max(near, far))


def _adapters(collective: Collective) -> int:
    """The number of a group's GPUs in one machine, each with its own adapter."""
    return max(1, min(GPUS_PER_MACHINE, collective.devices // collective.machines))
