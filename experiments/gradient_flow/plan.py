"""The plan of the experiment: its YAML; the hybrid, and others that differ from it in their middle alone.

`untied` is the fair control of invariance: weights constant on each interval of the flow's grid, independent pieces,
so that horizon, steps, control and alpha are the hybrid's. It also keeps the shift, the same function of time: without
it, or with a vector per layer that starts at zero, the inputs of the layers would differ too; and what the shift adds
to a divergence is in both. By default such pieces share nine tenths of their initial variance: almost a flow.

`quarters` is the same with the strength and the horizon of the layers that the flow replaces: n layers of length 1,
each divided into as many as the flow has steps. On [0, 1] that is a field n times as strong: alpha = n.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from experiments.config import StudyConfig, check_among
from experiments.jobs import Arm, Places, System
from experiments.recipes import Recipe, ordinary
from experiments.texts import Text
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Range

SYSTEMS = {
    "baseline": "ordinary layers instead of the flow",
    "hybrid": "ordinary layers, a flow, ordinary layers",
    "shallow": "only the ordinary layers of the hybrid, with nothing in the middle",
    "untied": "the hybrid with independent weights in each step of its flow",
    "quarters": "untied, in steps of the same length for as long as the replaced layers take, with a full field",
}


@dataclass
class GradientFlowConfig(StudyConfig):
    """In addition to `StudyConfig`:

    Attributes:
        hybrid: configuration of train_lm, a model with a flow between ordinary layers; its data is replaced by `text`.
        replaced_layers: number of ordinary layers in the baseline in place of the hybrid's flow.
        systems: of SYSTEMS, at least hybrid and baseline; by default these and shallow.
        final_steps: number of final steps over which the training loss of the verdict is averaged.
        solvers, steps: the trained flow is evaluated with each solver at each of these numbers of steps.
        refinements: m, Euler steps of the trained length / m, in the flow and in the baseline's and untied layers.
        coarse: numbers of Euler steps for each unit of time, fewer than trained, in the flow and in the untied layers.
        controls: number of random controls tried on each of a few sequences.
    """

    hybrid: str | None = None
    replaced_layers: Count = 2
    systems: list[str] = field(default_factory=lambda: ["baseline", "hybrid", "shallow"])
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456])
    final_steps: Count = 50
    evaluations: Count = 10
    solvers: list[str] = field(default_factory=lambda: ["euler", "heun", "rk4", "dopri5"])
    steps: list[Count] = field(default_factory=lambda: [2, 4, 8, 16])
    refinements: list[Annotated[int, Range(at_least=2)]] = field(default_factory=lambda: [2, 4, 8])
    coarse: list[Count] = field(default_factory=lambda: [1, 2])
    controls: Count = 8

    def horizon(self, system: str) -> int:
        """Units of time of a middle with untied weights or a flow; steps of the same length are as many more."""
        return self.replaced_layers if system == "quarters" else 1

    def check(self) -> None:
        super().check()
        check_among("systems", self.systems, SYSTEMS)
        if not {"hybrid", "baseline"} <= set(self.systems):
            raise UserError(f"`systems` must hold hybrid and baseline, which are compared; got {self.systems}")
        if not (self.solvers and self.coarse and self.steps and self.refinements):
            raise UserError("`solvers`, `coarse`, `steps` and `refinements` must each have at least one")
        for solver in self.solvers:
            solver_by_name(solver)


def arms(config: GradientFlowConfig, text: Text, run_dir: Path) -> list[Arm]:
    """The systems, in order.

    Raises:
        UserError: the hybrid has no flow on a fixed grid, no ordinary layers around it, or no control; or its flow
            cannot be evaluated with one of `solvers` and `steps`.
    """
    hybrid = config.recipe(config.hybrid, text, run_dir)
    model, known = hybrid.euler_flow(), hybrid.config.model
    if known.control is None or not known.prelude_layers or not known.coda_layers:
        raise UserError(
            f"{config.hybrid} must have `control`, and layers before and after its flow, `prelude_layers` and"
            f" `coda_layers`; it has {known.prelude_layers} and {known.coda_layers}"
        )
    if config.final_steps > hybrid.steps:
        raise UserError(f"`final_steps` is {config.final_steps}, of {hybrid.steps} steps in all")
    if known.depth.step_size != "uniform":
        raise UserError(
            f"{config.hybrid} has `depth.step_size: {known.depth.step_size}`, whose steps have length 1: it is no flow"
            " that other steps could solve. Set it to uniform"
        )
    try:
        Places(list(itertools.product(config.solvers, config.steps))).check(known.depth)
    except UserError as error:
        raise UserError(f"{config.hybrid}: {error}") from None
    steps = model["depth"]["steps"]
    if max(config.coarse) >= steps:
        raise UserError(f"`coarse` must be fewer than the {steps} steps of the flow, but is {config.coarse}")
    untied = {"type": "basis", "basis": "piecewise", "init": "independent"}
    control = model["control"] | {"alpha": float(config.replaced_layers)}
    longer = model["depth"] | {"steps": config.replaced_layers * steps}
    models = {
        "hybrid": model,
        "baseline": ordinary(model, config.replaced_layers),
        # The coda's layers take the place of the flow: a flow has at least one step.
        "shallow": ordinary(model, model["coda_layers"]) | {"coda_layers": 0},
        "untied": model | {"weights": untied | {"dim": steps}},
        "quarters": model | {"weights": untied | {"dim": longer["steps"]}, "depth": longer, "control": control},
    }
    ours = {
        # Norms of the gradients in every step, before the optimizer clips them.
        "trainer": {"watch": {"watch_targets": ["grads"], "interval": 1, "split_scan_layers": False}},
        "max_skipped_steps": hybrid.steps,  # non-finite steps are counted
    }
    recipes = {name: Recipe({**hybrid.raw, "model": models[name]}).but(ours) for name in config.systems}
    asks = {key: getattr(config, key) for key in ("solvers", "steps", "refinements", "coarse", "controls")}
    return System.arms(recipes, text, asks)
