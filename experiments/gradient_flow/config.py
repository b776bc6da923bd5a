"""What is trained and how it is read: the YAML of the experiment on gradient flow."""

from dataclasses import dataclass, field

from experiments.study import SeedsConfig
from experiments.text_config import Builtin, TextConfig
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError

SYSTEMS = {
    "baseline": "ordinary layers where the hybrid has its flow",
    "hybrid": "ordinary layers, a flow, ordinary layers",
    "shallow": "the ordinary layers of the hybrid alone, nothing in their middle",
}


@dataclass
class GradientFlowConfig(SeedsConfig):
    """Besides what `SeedsConfig` says:

    text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
    hybrid: configuration of train_lm of a model with a flow between ordinary layers; its data is replaced by `text`.
    replaced_layers: number of ordinary layers that the baseline has where the hybrid has its flow.
    systems: of SYSTEMS, hybrid and baseline at least.
    final_steps: over how many steps at the end the training loss of the verdict is averaged.
    solvers, steps: with each solver the trained flow is read at each of these numbers of steps.
    refinements: m, Euler steps of the trained length / m, in the flow and in the baseline's layers.
    controls: number of random controls that are tried on each of a few sequences.
    """

    text: TextConfig = field(default_factory=Builtin)
    hybrid: str | None = None
    replaced_layers: int = 2
    systems: list[str] = field(default_factory=lambda: list(SYSTEMS))
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456])
    final_steps: int = 50
    evaluations: int = 10
    solvers: list[str] = field(default_factory=lambda: ["euler", "heun", "rk4", "dopri5"])
    steps: list[int] = field(default_factory=lambda: [2, 4, 8, 16])
    refinements: list[int] = field(default_factory=lambda: [2, 4, 8])
    controls: int = 8

    def check(self) -> None:
        """Errors: `UserError` for what cannot be, before any work."""
        super().check()
        if self.hybrid is None:
            raise UserError(
                "`hybrid` is missing: a configuration of train_lm with a flow between ordinary layers, such as"
                " configs/wikitext2/hybrid_flow.yaml"
            )
        unknown = [name for name in self.systems if name not in SYSTEMS]
        if unknown or not {"hybrid", "baseline"} <= set(self.systems):
            raise UserError(
                f"`systems` must hold hybrid and baseline, which are compared, and may hold {', '.join(SYSTEMS)}; got"
                f" {self.systems}"
            )
        for name, values, least in (
            ("replaced_layers", [self.replaced_layers], 1),
            ("final_steps", [self.final_steps], 1),
            ("controls", [self.controls], 1),
            ("steps", self.steps, 1),
            ("refinements", self.refinements, 2),
        ):
            if not values or min(values) < least:
                raise UserError(f"`{name}` must be at least {least}, got {values}")
        for solver in self.solvers:
            solver_by_name(solver)
