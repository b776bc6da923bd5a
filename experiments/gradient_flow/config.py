"""What is trained and how it is read: the YAML of the experiment on gradient flow."""

from dataclasses import dataclass, field
from typing import Any

from experiments.text_config import Builtin, TextConfig
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError

SYSTEMS = {
    "baseline": "ordinary layers where the hybrid has its flow",
    "hybrid": "ordinary layers, a flow, ordinary layers",
    "shallow": "the ordinary layers of the hybrid alone, nothing in their middle",
}


@dataclass
class GradientFlowConfig:
    """
    text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
    hybrid: configuration of train_lm of a model with a flow between ordinary layers; its data is replaced by `text`.
    replaced_layers: number of ordinary layers that the baseline has where the hybrid has its flow.
    systems: of SYSTEMS, hybrid and baseline at least.
    overrides: merged into the configuration of every system.
    seeds: a seed settles initial weights and data order, which all systems share.
    final_steps: over how many steps at the end the training loss of the verdict is averaged.
    evaluations: how often the loss on the part `select` is read during a training; select_batches: of how many batches.
    report_batches: of how many batches of the part `report` each loss of a trained model is; all if null.
    solvers, steps: with each solver the trained flow is read at each of these numbers of steps.
    refinements: m, Euler steps of the trained length / m, in the flow and in the baseline's layers.
    controls: number of random controls that are tried on each of a few sequences.
    run_dir: where the runs go. output: folder of the results, by default `<run_dir>/results`.
    config_path: the YAML file that this came from; its name is that of the run directory, `runs/gradient_flow_<name>`.
    redraw: only table and figures, from `results.json` in `output`.
    """

    text: TextConfig = field(default_factory=Builtin)
    hybrid: str | None = None
    replaced_layers: int = 2
    systems: list[str] = field(default_factory=lambda: list(SYSTEMS))
    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456])
    final_steps: int = 50
    evaluations: int = 10
    select_batches: int | None = None
    report_batches: int | None = None
    solvers: list[str] = field(default_factory=lambda: ["euler", "heun", "rk4", "dopri5"])
    steps: list[int] = field(default_factory=lambda: [2, 4, 8, 16])
    refinements: list[int] = field(default_factory=lambda: [2, 4, 8])
    controls: int = 8
    run_dir: str | None = None
    output: str | None = None
    redraw: bool = False
    config_path: str | None = None

    def check(self) -> None:
        """Errors: `UserError` for what cannot be, before any work."""
        unknown = [name for name in self.systems if name not in SYSTEMS]
        if unknown or not {"hybrid", "baseline"} <= set(self.systems):
            raise UserError(
                f"`systems` must hold hybrid and baseline, which are compared, and may hold {', '.join(SYSTEMS)}; got"
                f" {self.systems}"
            )
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")
        for name, values, least in (
            ("replaced_layers", [self.replaced_layers], 1),
            ("final_steps", [self.final_steps], 1),
            ("evaluations", [self.evaluations], 1),
            ("controls", [self.controls], 1),
            ("steps", self.steps, 1),
            ("refinements", self.refinements, 2),
        ):
            if not values or min(values) < least:
                raise UserError(f"`{name}` must be at least {least}, got {values}")
        for solver in self.solvers:
            solver_by_name(solver)
