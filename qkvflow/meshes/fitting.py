"""Finds changes that make a step fit: a few changes of the configuration, each compiled, the cheapest first.

`per_device_parallelism` accumulates gradients over parts of the batch, a mesh shards more of the large arrays, and the
others recompute what they do not keep. The training stays the same, except for `adjoint: reversible`, which uses its
own scheme.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from qkvflow.errors import UserError, first_line
from qkvflow.meshes.report import MeshReport
from qkvflow.meshes.shape import MeshShape
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import largest_batch
from qkvflow.units import in_bytes


@dataclass(frozen=True)
class Change:
    """
    Attributes:
        what: `batch`, `mesh`, `adjoint`, `evaluate` or `remat`.
        words: command-line words for the change.
    """

    what: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Trial:
    """A change and its result: a report, or the reason why there is none."""

    change: Change
    report: MeshReport | None
    refused: str = ""

    @property
    def seconds(self) -> float | None:
        """Lower bound on the time of a step; None if it does not fit."""
        line = None if self.report is None or not self.report.fits_target else self.report.roofline
        return None if line is None else line.seconds


def changes(config: TrainConfig, shape: MeshShape) -> Iterator[Change]:
    """Changes that may help, for a configuration compiled for devices of this shape."""
    model: Any = config.model
    depth = getattr(model, "depth", None)
    if depth is not None and not depth.is_general:
        if depth.adjoint in ("direct", "selective"):
            yield Change("remat", ("--model.depth.adjoint", "checkpoint"))
        if (model.weights.evaluate if depth.evaluate == "auto" else depth.evaluate) == "batched":
            yield Change("evaluate", ("--model.depth.evaluate", "in_scan"))
        if depth.adjoint != "reversible":
            yield Change("adjoint", ("--model.depth.adjoint", "reversible"))
    elif getattr(model, "gradient_checkpointing", True) is False:
        yield Change("remat", ("--model.gradient_checkpointing", "true"))
    trainer, devices = shape.applied(config.trainer), shape.devices
    model_axes = prod(n for name, n in trainer.mesh.axes.items() if name not in ("data", "replica") and n > 0)
    each = trainer.per_device_parallelism
    if each < 0:
        each = largest_batch(trainer) // (devices // model_axes)
    for part in (2, 4, 8):
        if each >= part and each % part == 0:
            yield Change("batch", ("--trainer.per_device_parallelism", str(each // part)))
    for model_axis in (2, 4, 8):
        if devices % model_axis == 0 and model_axis < devices and model_axis != model_axes:
            yield Change("mesh", ("--mesh", f"{devices // model_axis}x{model_axis}"))


def try_changes(found: Iterator[Change], compiled: Callable[[Change], MeshReport]) -> list[Trial]:
    """Compiles each change; skips further changes of a kind after the first that fits, since they would cost more.

    One whose compiler fails or crashes counts as refused.
    """
    trials: list[Trial] = []
    for change in found:
        if any(t.seconds is not None and t.change.what == change.what for t in trials):
            continue
        try:
            trials.append(Trial(change, compiled(change)))
        except UserError as error:
            trials.append(Trial(change, None, str(error)))
        except RuntimeError as error:
            trials.append(Trial(change, None, first_line(error).rstrip(":")))
    return trials


def as_record(trials: list[Trial]) -> dict[str, Any]:
    """For JSON."""
    tried = [
        {
            "change": str(t.change),
            "what": t.change.what,
            "memory_bytes": t.report and t.report.memory,
            "fits": t.report is not None and t.report.fits_target,
            "roofline_seconds": t.seconds,
            "refused": t.refused or None,
        }
        for t in trials
    ]
    best = cheapest(trials)
    return {"tried": tried, "cheapest": best and str(best.change)}


def told(trials: list[Trial]) -> list[str]:
    """Human-readable lines: what was tried, and the cheapest change that fits."""
    lines = []
    for trial in trials:
        if trial.report is None:
            lines.append(f"{trial.change}: cannot be: {trial.refused}")
            continue
        fits = "fits" if trial.report.fits_target else "does not fit"
        least = "" if trial.seconds is None else f", a step takes at least {1000 * trial.seconds:.4g} ms"
        lines.append(f"{trial.change}: {in_bytes(trial.report.memory)}, {fits}{least}")
    best = cheapest(trials)
    return [
        *lines,
        f"the cheapest change that fits: {best.change}" if best else "none of these fits: use more or larger chips",
    ]


def cheapest(trials: list[Trial]) -> Trial | None:
    """Of the changes that fit, the one with the shortest step."""
    fitting = [t for t in trials if t.seconds is not None]
    return min(fitting, key=lambda t: t.seconds or 0.0) if fitting else None
