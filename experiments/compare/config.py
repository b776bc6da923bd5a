"""What is compared, on which text and by which rules: the YAML of the comparison."""

from dataclasses import dataclass, field
from typing import Any

from experiments.text_config import Builtin, TextConfig
from qkvflow.errors import UserError

ROWS = {
    "iso_step": "the same number of steps",
    "iso_flop": "the same number of FLOPs",
    "iso_parameter": "the same number of trained parameters",
}


@dataclass
class CompareConfig:
    """
    text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
    systems: name -> configuration of train_lm; its data is replaced by `text`.
    reference: the system that the others are compared with, in number of FLOPs and parameters too.
    overrides: merged into the configuration of every system.
    seeds: of the trainings that are reported; a seed settles data order and initial weights.
    rows: of ROWS.
    learning_rates: for each system, in each size, the one with the lowest mean loss on the part `select` at the end of
        trainings with `selection_seeds` is taken; one alone is taken as it is. If empty, that of each configuration.
    selection_seeds: others than `seeds`.
    evaluations: how often the loss on `select` is read during a training; select_batches: of how many batches.
    report_batches: of how many batches of the part `report` the reported loss is; all if null.
    targets: losses on `select` to whose first crossing time and FLOPs are given.
    run_dir: where the runs go. output: folder of the results, by default `<run_dir>/results`.
    config_path: the YAML file that this came from; its name is that of the run directory, `runs/compare_<name>`.
    redraw: only tables and figures, from `results.json` in `output`.
    """

    text: TextConfig = field(default_factory=Builtin)
    systems: dict[str, str] = field(default_factory=dict)
    reference: str = "standard"
    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456, 789, 1011])
    rows: list[str] = field(default_factory=lambda: list(ROWS))
    learning_rates: list[float] = field(default_factory=list)
    selection_seeds: list[int] = field(default_factory=lambda: [0])
    evaluations: int = 20
    select_batches: int | None = None
    report_batches: int | None = None
    targets: list[float] = field(default_factory=list)
    run_dir: str | None = None
    output: str | None = None
    redraw: bool = False
    config_path: str | None = None

    def check(self) -> None:
        """Errors: `UserError` for what cannot be compared, before any work."""
        if self.reference not in self.systems:
            names = ", ".join(self.systems) or "none"
            raise UserError(f"`reference` is {self.reference!r}, which is not among `systems` ({names})")
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not self.rows:
            raise UserError(f"`rows` has {', '.join(unknown) or 'nothing in it'}. Choices: {', '.join(ROWS)}")
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")
        both = set(self.seeds) & set(self.selection_seeds)
        if len(self.learning_rates) > 1 and (both or not self.selection_seeds):
            raise UserError(
                f"`selection_seeds` must be others than `seeds`, at least one, but are {self.selection_seeds}: what is"
                " chosen by a training must not be reported of the same one"
            )
        if self.evaluations < 1:
            raise UserError(f"`evaluations` must be at least 1, got {self.evaluations}")
