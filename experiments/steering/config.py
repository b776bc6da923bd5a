"""Which model is steered between which texts, and by which rules: the YAML of the experiment."""

from dataclasses import dataclass, field
from typing import Any

from experiments.study import SeedsConfig
from experiments.text_config import Builtin, TextConfig
from qkvflow.errors import UserError


@dataclass
class SteeringConfig(SeedsConfig):
    """Besides what `SeedsConfig` says:

    base: configuration of train_lm, of a model with control; its data is replaced.
    a, b: the texts.
    record: characters of a record. without_control: share of the records that have none.
    samples: texts that are generated with each control, for each seed; length: of each, in bytes.
    temperature: of sampling.
    between: controls (1 - u, u) from text A at u = 0 to text B at u = 1.
    """

    base: str | None = None
    a: TextConfig = field(default_factory=lambda: Builtin("topics"))
    b: TextConfig = field(default_factory=lambda: Builtin("library"))
    record: int = 1000
    without_control: float = 0.2
    samples: int = 64
    length: int = 120
    temperature: float = 1.0
    between: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])

    def check(self) -> None:
        """Errors: `UserError` for what cannot be, before any work."""
        super().check()
        if self.a == self.b:
            raise UserError("`a` and `b` must be two texts, but are the same")
        if not {0.0, 1.0} <= set(self.between):
            raise UserError(f"`between` must have 0 (text A) and 1 (text B) among it, got {self.between}")
        if not 0.0 <= self.without_control < 1.0:
            raise UserError(f"`without_control` is a share of the records, in [0, 1); got {self.without_control}")
        for name in ("record", "samples", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise UserError(f"`temperature` must be above 0, got {self.temperature}: greedy samples are all the same")

    def settings(self) -> dict[str, Any]:
        """What decides how the model is trained and sampled from, as plain data."""
        names = ("record", "without_control", "samples", "length", "temperature", "between", "report_batches")
        return {name: getattr(self, name) for name in names}
