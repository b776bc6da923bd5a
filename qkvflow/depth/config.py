"""YAML `depth:` how the model travels from t = 0 to t = 1."""

from dataclasses import dataclass

from qkvflow.depth.plan import Plan
from qkvflow.depth.solvers import solver_by_name, tableau
from qkvflow.errors import UserError

ENDPOINTS = ("right", "left")
STEP_SIZES = ("uniform", "residual")
ADJOINTS = ("checkpoint", "direct")
EVALUATE = ("auto", "batched", "in_scan")


@dataclass(frozen=True)
class DepthConfig:
    """A fixed grid of `steps` steps of `solver`.

    endpoint: which end of its step Euler sees (`right` as in the paper, `left`); methods with several stages have
        their own places within the step, and do not read it.
    step_size: `uniform`, h = 1/steps, an ODE on [0, 1]; `residual`, h = 1, an ordinary residual network (Euler only).
    adjoint: `checkpoint`, exact gradients, stores one state per step and recomputes the rest; `direct`, exact
        gradients, stores everything.
    evaluate: when W(t) is computed, see `qkvflow.depth.fixed`.
    """

    solver: str = "euler"
    steps: int = 12
    endpoint: str = "right"
    step_size: str = "uniform"
    adjoint: str = "checkpoint"
    evaluate: str = "auto"

    def __post_init__(self):
        tab = tableau(solver_by_name(self.solver))
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}.")
        for name, choices in (
            ("endpoint", ENDPOINTS),
            ("step_size", STEP_SIZES),
            ("adjoint", ADJOINTS),
            ("evaluate", EVALUATE),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}: {getattr(self, name)!r} is not known. Choices: {', '.join(choices)}.")
        if self.step_size == "residual" and tab.stages > 1:
            raise UserError(
                f"step_size: residual is a plain residual network, x + B(x), and has no meaning for {self.solver}, a"
                f" method with {tab.stages} stages. Use solver: euler, or step_size: uniform."
            )

    def plan(self, evaluate: str) -> Plan:
        """The plan; `evaluate` (`batched` or `in_scan`) is what `auto` stands for with the weights at hand."""
        return Plan(
            tableau=tableau(solver_by_name(self.solver)),
            steps=self.steps,
            endpoint=self.endpoint,
            step=1.0 / self.steps if self.step_size == "uniform" else 1.0,
            adjoint=self.adjoint,
            evaluate=evaluate if self.evaluate == "auto" else self.evaluate,
        )
