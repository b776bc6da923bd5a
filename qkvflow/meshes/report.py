"""The report of `describe --mesh`: memory, work and traffic of one device in one training step, and warnings."""

import dataclasses
from dataclasses import dataclass, field

from qkvflow.meshes.chips import CHIPS, Chip
from qkvflow.meshes.collectives import Collective
from qkvflow.meshes.roofline import Roofline, roofline
from qkvflow.meshes.whole import Whole
from qkvflow.units import in_bytes

GIB = 1 << 30
DEVICES = (16, 32, 80)  # GiB
TIGHT = 0.9  # of a device's memory: the runtime, fragmentation and other programs use the rest
NOTABLE = 0.05  # of the memory that a device needs


@dataclass(frozen=True)
class MeshReport:
    """
    Attributes:
        mesh: axis -> size; axes of size one are left out.
        parameters, optimizer: bytes on a device; all_parameters, all_optimizer: of the whole model.
        arguments, outputs, donated, temporary: bytes on a device by XLA's count; donated is memory that outputs share
            with arguments, temporary is everything else that lives during the step: activations, gradients, gathered
            weights.
        flops: of matrix products, per device and step; xla_flops: XLA's own count, which counts each loop once.
        unknown_loops: loops counted once because their number of iterations is unknown (adaptive steps).
        collectives: per device and step.
        whole_arguments, whole_temporaries: arrays above `large` bytes that every device holds in full.
        rematerialised: XLA's warnings that it gathers an array only to shard it in another way.
        compile_seconds, compile_bytes: time and memory of compilation on this machine.
        devices: number of devices.
        target: the machine compiled for; None for virtual CPUs.
        attention: the kernel of self-attention.
        fp32_flops: the part of `flops` in products of fp32 arrays.
        bytes_accessed: between a device and its memory, per step.
        model_flops: per step on all devices, as training counts them for its MFU.
        compiled: whether there is a program: a TPU's compiler produces none that does not fit. Without one there are no
            FLOPs and no traffic, and `temporary` is what that compiler requested.
        given: bytes of the arrays in `arguments` without padding: a TPU pads arrays to whole tiles.
        fallbacks: why preferred kernels could not be used, from Levanter's messages.
        texts: number of texts that a decoding step continues; 0 for a training step.
    """

    mesh: dict[str, int]
    parameters: int
    optimizer: int
    all_parameters: int
    all_optimizer: int
    arguments: int
    outputs: int
    donated: int
    temporary: int
    flops: float
    xla_flops: float
    unknown_loops: int
    collectives: list[Collective]
    whole_arguments: list[Whole]
    whole_temporaries: list[Whole]
    large: int
    rematerialised: int
    compile_seconds: float
    compile_bytes: int
    devices: int = 0
    target: str | None = None
    attention: str = ""
    fp32_flops: float = 0.0
    bytes_accessed: float = 0.0
    model_flops: float = 0.0
    compiled: bool = True
    given: int = 0
    fallbacks: list[str] = field(default_factory=list)
    texts: int = 0

    @staticmethod
    def too_large(needed: int, **known) -> "MeshReport":
        """The report of a step that the compiler rejected because a device has less memory than the `needed` bytes."""
        nothing: dict = {name: [] for name in ("collectives", "whole_temporaries")}
        nothing |= dict.fromkeys(("flops", "xla_flops", "unknown_loops", "outputs", "donated"), 0)
        arguments = known["given"]
        parts = {"arguments": arguments, "temporary": max(0, needed - arguments)}
        return MeshReport(**known, **nothing, **parts, compiled=False)

    @staticmethod
    def read(plain: dict) -> "MeshReport":
        """The inverse of `dataclasses.asdict`."""
        parts = {"collectives": Collective, "whole_arguments": Whole, "whole_temporaries": Whole}
        made = {
            name: [kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in part.items()}) for part in plain[name]]
            for name, kind in parts.items()
        }
        return MeshReport(**(plain | made))

    @property
    def memory(self) -> int:
        """Bytes that a device needs: arguments, outputs that are not donated arguments, temporary memory."""
        return self.arguments + self.outputs - self.donated + self.temporary

    @property
    def fits(self) -> dict[int, bool]:
        """Device memory in GiB -> whether the step fits, with room for the runtime."""
        return {size: self.memory <= TIGHT * size * GIB for size in DEVICES}

    @property
    def chip(self) -> Chip | None:
        return None if self.target is None else CHIPS[self.target.partition(":")[0]]

    @property
    def memory_limit(self) -> int | None:
        """Bytes of the target's device that a step may use: the rest is for the runtime and fragmentation."""
        return None if self.chip is None else int(TIGHT * self.chip.memory)

    @property
    def fits_target(self) -> bool:
        """Whether the step fits the target; True without one."""
        return self.compiled and (self.memory_limit is None or self.memory <= self.memory_limit)

    @property
    def roofline(self) -> Roofline | None:
        """The shortest time of a step on the target; None without a target or a program."""
        if self.chip is None or not self.compiled:
            return None
        return roofline(self.chip, self.flops, self.fp32_flops, self.bytes_accessed, self.collectives)

    def sections(self) -> dict[str, dict[str, str | float | int | None]]:
        """Rows of `describe`."""
        axes = " x ".join(f"{name} {n}" for name, n in self.mesh.items())
        return {
            "mesh": {"devices": axes or "1 device", **self._target_rows()},
            "memory per device": {
                "parameters": _share(self.parameters, self.all_parameters),
                **({} if self.texts else {"optimizer": _share(self.optimizer, self.all_optimizer)}),
                "arguments": in_bytes(self.arguments),
                **self._filled(),
                "arguments that results replace": in_bytes(self.donated) if self.compiled else None,
                "activations, gradients, other temporary": in_bytes(self.temporary),
                "in all": in_bytes(self.memory),
                **self._fits(),
            },
            "a step, per device": {
                "FLOPs of matrix products": self.flops if self.compiled else None,
                "bytes read and written": in_bytes(self.bytes_accessed) if self.compiled else None,
                **{
                    f"{c.kind} over {c.axes}" if c.axes else c.kind: f"{in_bytes(c.bytes)}, {round(c.count)} times"
                    for c in self.collectives
                },
            },
            **self._roofline_rows(),
            f"whole on every device, each > {in_bytes(self.large)}": {
                "parameters and optimizer": _arrays(self.whole_arguments),
                "made in the step": _arrays(self.whole_temporaries),
            },
            "compiling took": {
                "seconds": round(self.compile_seconds),
                "memory of this machine": in_bytes(self.compile_bytes),
            },
        }

    def notes(self) -> list[str]:
        """Human-readable lines: the large arrays by name, and warnings."""
        lines = []
        for whole in self.whole_arguments:
            lines.append(f"whole on every device: {whole.name} {list(whole.sizes)}, {in_bytes(whole.bytes)}")
        for whole in self.whole_temporaries[:10]:
            often = f"{round(whole.times)} times" if whole.times != 1 else "once"
            lines.append(f"created whole {often} a step: {list(whole.sizes)}, {in_bytes(whole.bytes)}, by {whole.name}")
        if len(self.whole_temporaries) > 10:
            lines.append(f"... and {len(self.whole_temporaries) - 10} smaller ones (--json FILE lists all)")
        return lines + [f"warning: {text}" for text in self.warnings()]

    def warnings(self) -> list[str]:
        """Causes of much higher memory use than a device's share, or of uncertain numbers."""
        found = [] if self.target is None else list(self.fallbacks)
        many = sum(w.bytes for w in self.whole_arguments)
        if many > NOTABLE * self.memory:
            found.append(
                f"{in_bytes(many)} of parameters and optimizer are not sharded: none of their axes is in"
                " `trainer.mesh.param_mapping` or `shared_mapping`"
            )
        for whole in self.whole_temporaries:
            if whole.bytes > NOTABLE * self.memory and whole.times <= 1:
                found.append(f"{list(whole.sizes)}, {in_bytes(whole.bytes)}, is created whole on every device")
        if self.compiled and not self.texts and self.donated < 0.99 * (self.parameters + self.optimizer):
            found.append(
                f"only {in_bytes(self.donated)} of the old state's memory is reused for the new one: for a moment both"
                " exist"
            )
        if self.rematerialised:
            found.append(f"XLA gathers {self.rematerialised} arrays in full only to shard them differently")
        if self.unknown_loops:
            found.append(
                f"the number of iterations of {self.unknown_loops} loops is unknown (blockwise attention, adaptive"
                " steps): FLOPs and traffic count one iteration of each"
            )
        return found

    def _target_rows(self) -> dict[str, str]:
        if self.target is None:
            return {}
        what = {"decoding": f"a token of each of {self.texts} texts"} if self.texts else {}
        return {"compiled for": self.target, **what, "attention": self.attention or "-"}

    def _filled(self) -> dict[str, str]:
        filled = self.arguments - self.given
        return {"of these padding of tiles": in_bytes(filled)} if self.given and filled > 0.01 * self.given else {}

    def _fits(self) -> dict[str, str]:
        if self.chip is None or self.memory_limit is None:
            return {f"fits in {size} GiB": self._fit(size) for size in DEVICES}
        size = in_bytes(self.chip.memory)
        if self.fits_target:
            return {f"fits in {size}": f"yes, {1 - self.memory / self.chip.memory:.0%} free"}
        over = self.memory - self.memory_limit
        told = "the compiler refuses it" if not self.compiled else f"{in_bytes(over)} above {TIGHT:.0%}"
        return {f"fits in {size}": f"no, {told}"}

    def _roofline_rows(self) -> dict[str, dict[str, str | float | int | None]]:
        line = self.roofline
        if self.target is None:
            return {}
        if line is None or self.chip is None:
            return {"roofline": {"a step takes at least": None}}
        times = {"compute": line.compute, "memory": line.memory, "links": line.links}
        mfu = line.mfu(self.model_flops, self.chip, self.devices)
        return {
            "roofline": {
                **{f"{name} alone": f"{1000 * seconds:.4g} ms" for name, seconds in times.items()},
                "a step takes at least": f"{1000 * line.seconds:.4g} ms ({line.bound})",
                "MFU at most": f"{mfu:.1%}" if self.model_flops else None,
                **({"tokens per second, at most": round(self.texts / line.seconds)} if self.texts else {}),
            }
        }

    def _fit(self, size: int) -> str:
        if self.fits[size]:
            return f"yes, {1 - self.memory / (size * GIB):.0%} free"
        return f"no, {in_bytes(self.memory - TIGHT * size * GIB)} above {TIGHT:.0%}"


def as_dict(report: MeshReport) -> dict:
    """For JSON: the fields and the values derived from them."""
    fits = {str(size): fit for size, fit in report.fits.items()}
    return dataclasses.asdict(report) | {"memory": report.memory, "fits_gib": fits, "warnings": report.warnings()}


def summary(report: MeshReport) -> dict:
    """The summary of a target's report, for JSON; None without a program."""
    line, chip = report.roofline, report.chip
    assert chip is not None
    known = None if line is None else report
    return {
        "target": report.target,
        "devices": report.devices,
        "mesh_axes": report.mesh,
        "attention": report.attention,
        "memory_bytes": report.memory,
        "memory_limit_bytes": report.memory_limit,
        "chip_memory_bytes": chip.memory,
        "arguments_bytes": report.arguments,
        "arguments_arrays_bytes": report.given,
        "temporary_bytes": report.temporary,
        "donated_bytes": report.donated,
        "fits": report.fits_target,
        "flops": known and report.flops,
        "bytes_accessed": known and report.bytes_accessed,
        "collective_bytes": known and sum(c.bytes for c in report.collectives),
        "collectives": [dataclasses.asdict(c) for c in report.collectives],
        "roofline_seconds": line and line.seconds,
        "roofline": line and {**dataclasses.asdict(line), "bound": line.bound},
        "model_flops": report.model_flops,
        **({"texts": report.texts} if report.texts else {}),
        "mfu_bound": line and line.mfu(report.model_flops, chip, report.devices),
    }


def _share(part: int, of: int) -> str:
    return f"{in_bytes(part)} of {in_bytes(of)}"


def _arrays(found: list[Whole]) -> str:
    return f"{len(found)}, {in_bytes(sum(w.bytes for w in found))}" if found else "none"
