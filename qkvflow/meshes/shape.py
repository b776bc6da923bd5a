"""`--mesh 64`, `--mesh 8x8`, `--mesh 2x4x8`: the number of devices and their arrangement."""

import dataclasses
from dataclasses import dataclass
from math import prod

from levanter.trainer import TrainerConfig

from qkvflow.errors import UserError, shortened

_AXES = {2: ("data", "model"), 3: ("replica", "data", "model")}
# The largest pods have some ten thousand; for many more, the compiler on this machine runs out of memory or threads.
_LARGEST = 1 << 16
_FORMS = "`64` (devices, arranged as `trainer.mesh` says), `8x8` (data x model) or `2x4x8` (replica x data x model)"


@dataclass(frozen=True)
class MeshShape:
    """
    Attributes:
        devices: number of devices.
        axes: sizes of the named mesh axes; none for a plain number of devices.
    """

    devices: int
    axes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def read(text: str) -> "MeshShape":
        """From the command line.

        Raises:
            UserError: anything but one to three positive numbers joined by `x`, or too many devices.
        """
        words = text.lower().split("x")
        sizes = [int(w[:20]) if w.isascii() and w.isdecimal() else 0 for w in words]
        if not all(sizes) or len(sizes) > 3:
            raise UserError(f"--mesh {shortened(text)}: give {_FORMS}")
        if prod(sizes) > _LARGEST:
            raise UserError(f"--mesh {shortened(text)}: the step can be compiled for at most {_LARGEST:,} devices")
        return MeshShape(prod(sizes), tuple(zip(_AXES[len(sizes)], sizes, strict=True)) if len(sizes) > 1 else ())

    def applied(self, trainer: TrainerConfig) -> TrainerConfig:
        """A copy of the trainer's configuration whose mesh has this shape.

        Raises:
            UserError: the configuration has its own mesh axis that the shape does not give.
        """
        if not self.axes:
            return dataclasses.replace(trainer)
        sizes = {"replica": 1} | dict(self.axes)
        others = {name: n for name, n in trainer.mesh.axes.items() if name not in sizes and n != 1}
        if others:
            raise UserError(
                f"--mesh names the axes {', '.join(n for n, _ in self.axes)}, but `trainer.mesh.axes` also has"
                f" {others}. Give only the number of devices, `--mesh {self.devices}`, and set sizes with"
                " --trainer.mesh.axes"
            )
        return dataclasses.replace(trainer, mesh=dataclasses.replace(trainer.mesh, axes=sizes))
