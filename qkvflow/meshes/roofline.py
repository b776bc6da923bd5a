"""The shortest time that a step can take on a chip: its work at the chip's peak rates, all of them at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass

from qkvflow.meshes.chips import GPUS_PER_MACHINE, Chip
from qkvflow.meshes.collectives import Collective


@dataclass(frozen=True)
class Roofline:
    """
    Attributes:
        compute, memory, links: seconds of a step, if nothing but that were to be done.
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """A lower bound: the longest of the three, as though they could be done at once."""
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        """Which of them it is."""
        times = {"compute": self.compute, "memory": self.memory, "links": self.links}
        return max(times, key=lambda name: times[name])

    def mfu(self, model_flops: float, chip: Chip, devices: int) -> float:
        """The largest possible share of the chips' peak that is spent on the model's own FLOPs (`model_flops`: of a
        step, all devices)."""
        return model_flops / (self.seconds * devices * chip.flops)


def roofline(chip: Chip, flops: float, fp32_flops: float, traffic: float, sent: Sequence[Collective]) -> Roofline:
    """
    Args:
        flops, fp32_flops: of products of matrices on a device, and of these the ones of fp32 arrays.
        traffic: bytes between a device and its memory.
        sent: the collectives. Between machines a ring of all their GPUs crosses each machine's border once for each
            network adapter, of which a GPU has one.
    """
    compute = (flops - fp32_flops) / chip.flops + fp32_flops / chip.flops_fp32
    near = sum(c.sent for c in sent) / chip.links
    far = sum(c.sent / _adapters(c) for c in sent if c.machines > 1) / chip.network if chip.platform == "gpu" else 0.0
    return Roofline(compute, traffic / chip.bandwidth, max(near, far))


def _adapters(collective: Collective) -> int:
    """That of a group's GPUs in one machine; each has its own."""
    return max(1, min(GPUS_PER_MACHINE, collective.devices // collective.machines))
