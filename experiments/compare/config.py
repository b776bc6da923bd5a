"""What is compared, on which text and by which rules: the YAML of the comparison."""

from dataclasses import dataclass, field

from experiments.study import StudyConfig
from qkvflow.errors import UserError

# A row of equal FLOPs has no training of its own where that would change the number of steps by a smaller share.
SAME_FLOPS = 0.05
ROWS = {
    "iso_step": "the same number of steps",
    "iso_flop": "nearly the same number of FLOPs",
    "iso_parameter": "nearly the same number of trained parameters",
}


@dataclass
class CompareConfig(StudyConfig):
    """Besides what `StudyConfig` says; a learning rate is chosen for each system in each size:

    systems: name -> configuration of train_lm; its data is replaced by `text`.
    reference: the system that the others are compared with, in number of FLOPs and parameters too.
    rows: of ROWS.
    targets: losses on `select` to whose first crossing time and FLOPs are given.
    """

    systems: dict[str, str] = field(default_factory=dict)
    reference: str = "standard"
    rows: list[str] = field(default_factory=lambda: list(ROWS))
    targets: list[float] = field(default_factory=list)

    def check(self) -> None:
        """Errors: `UserError` for what cannot be compared, before any work."""
        if self.reference not in self.systems:
            names = ", ".join(self.systems) or "none"
            raise UserError(f"`reference` is {self.reference!r}, which is not among `systems` ({names})")
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not self.rows:
            raise UserError(f"`rows` has {', '.join(unknown) or 'nothing in it'}. Choices: {', '.join(ROWS)}")
        super().check()
