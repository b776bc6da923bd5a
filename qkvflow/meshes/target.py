"""`--target v5e`, `--target v5e:8x8`, `--target h200:16`: a machine to compile for."""

from dataclasses import dataclass
from math import prod

from qkvflow.errors import UserError, shortened
from qkvflow.meshes.chips import CHIPS, GPUS_PER_MACHINE, Chip

# Slices listed in Google's documentation of each TPU.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        kind: of chip, a key of `CHIPS`.
        topology: `4x8` of a TPU slice; machines x GPUs otherwise, `2x8`.
    """

    kind: str
    topology: str

    @staticmethod
    def read(text: str, devices: int | None = None) -> "Target":
        """From the command line.

        Args:
            devices: number of devices in the mesh; None without a mesh: the topology then gives it.

        Raises:
            UserError: no such chip or topology, or its number of chips differs from the mesh's number of devices.
        """
        kind, _, topology = text.lower().partition(":")
        if kind not in CHIPS:
            raise UserError(
                f"--target {shortened(text)} is unknown. Targets: {', '.join(CHIPS)}, and topologies such as v5e:4x4"
            )
        tpu = CHIPS[kind].platform == "tpu"
        if not topology:
            if devices is None and tpu:
                raise UserError(
                    f"--target {kind} needs a number of chips: give a topology (--target {kind}:{_shapes(kind)[3]}) or"
                    " --mesh"
                )
            return Target(kind, _slice_of(kind, devices) if devices and tpu else _machines(devices or GPUS_PER_MACHINE))
        target = Target(kind, topology if tpu else _machines_of(kind, topology))
        if tpu and topology not in _shapes(kind):
            raise UserError(f"{kind} has no topology {shortened(topology)}: it has {', '.join(_shapes(kind))}")
        if devices is not None and devices != target.devices:
            raise UserError(
                f"--mesh has {devices:,} devices, but {target} has {target.devices:,} chips. Give a mesh of"
                f" {target.devices}, or --target {kind} alone"
            )
        return target

    @staticmethod
    def read_smallest(text: str) -> "Target":
        """From the command line, for a program of one device: without a topology, the smallest that there is.

        Raises:
            UserError: no such chip or topology.
        """
        kind, _, topology = text.lower().partition(":")
        if topology or kind not in CHIPS:
            return Target.read(text)
        return Target(kind, _shapes(kind)[0] if CHIPS[kind].platform == "tpu" else _machines(1))

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def devices(self) -> int:
        return prod(int(n) for n in self.topology.split("x"))

    def __str__(self) -> str:
        return f"{self.kind}:{self.topology}"


def _shapes(kind: str) -> tuple[str, ...]:
    return _FLAT if CHIPS[kind].dimensions == 2 else _DEEP


def _slice_of(kind: str, devices: int) -> str:
    sizes = {prod(int(n) for n in shape.split("x")): shape for shape in _shapes(kind)}
    if devices not in sizes:
        raise UserError(
            f"--mesh has {devices:,} devices, but {kind} has no slice with that many chips: it has slices of"
            f" {', '.join(map(str, sizes))}"
        )
    return sizes[devices]


def _machines(devices: int) -> str:
    if devices > GPUS_PER_MACHINE and devices % GPUS_PER_MACHINE:
        raise UserError(
            f"{devices:,} GPUs do not fill machines of {GPUS_PER_MACHINE}: give at most {GPUS_PER_MACHINE}, or a"
            " multiple of it"
        )
    return f"{max(1, devices // GPUS_PER_MACHINE)}x{min(devices, GPUS_PER_MACHINE)}"


def _machines_of(kind: str, topology: str) -> str:
    words = topology.split("x")
    if len(words) > 2 or not all(w.isascii() and w.isdecimal() and 0 < int(w[:9]) <= _LARGEST for w in words):
        raise UserError(
            f"--target {kind}:{shortened(topology)}: give a number of GPUs, `{kind}:16`, or machines x GPUs of each,"
            f" `{kind}:2x8`"
        )
    if len(words) == 2 and int(words[1]) > GPUS_PER_MACHINE:
        raise UserError(
            f"--target {kind}:{topology}: a machine has at most {GPUS_PER_MACHINE} GPUs; for {words[0]} x {words[1]} of"
            f" them, `{kind}:{int(words[0]) * int(words[1])}`"
        )
    return _machines(int(words[0])) if len(words) == 1 else topology
