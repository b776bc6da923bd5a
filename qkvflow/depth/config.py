"""YAML `depth:` how the model travels from t = 0 to t = 1."""

import contextlib
import dataclasses
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkvflow.depth.fixed import FixedPlan
from qkvflow.depth.general import AdaptivePlan, BacksolvePlan, Tolerances
from qkvflow.depth.grid import StepGrid
from qkvflow.depth.plan import AbstractPlan
from qkvflow.depth.schedule import StepGrowth, StepRange
from qkvflow.depth.solvers import solver_by_name, tableau
from qkvflow.errors import UserError
from qkvflow.ranges import NotNegative, Positive, Steps, check_ranges

ENDPOINTS = ("right", "left")
STEP_SIZES = ("uniform", "residual")
ADJOINTS = ("checkpoint", "selective", "direct", "reversible", "backsolve")
EVALUATE = ("auto", "batched", "in_scan")
TIME_SAMPLING = ("fixed", "jitter")
COUPLING = 0.99  # the value of McCallum and Foster
MAX_STEPS = 256


def _steps(given: Any) -> int | StepRange | StepGrowth:
    """Of a whole number (NumPy's, too), or the mapping of a range or of a growing depth.

    Raises:
        UserError: it is something else.
    """
    if isinstance(given, StepRange | StepGrowth):
        return given
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        return int(given)
    if isinstance(given, Mapping):
        kind = StepGrowth if "grow" in given else StepRange
        with contextlib.suppress(TypeError):  # other keys than it has
            return kind(**given)
    raise UserError(f"steps: a whole number, {{min: 6, max: 12}} or {{grow: {{0.0: 3, 0.5: 6}}}}; got {given!r}.")


@dataclass(frozen=True)
class DepthConfig:
    """A fixed grid of `steps` steps of `solver`; with `rtol` or `atol`, steps of adaptive length.

    Attributes:
        solver: `euler`, `midpoint`, `heun`, `ralston`, `rk4`, `bosh3`, `tsit5`, `dopri5`, `dopri8`, ...
        steps: a number; `{min, max}`, from which training draws (`StepRange`); or `{grow: {0.0: 3, 0.25: 6, 0.6: 12}}`,
            starting at these fractions of training (`StepGrowth`). With tolerances, 1/steps is the length of the first
            trial step.
        endpoint: the end of the step at which Euler evaluates W (`right` as in the paper, or `left`); multi-stage
            methods have their own points within the step and ignore it.
        step_size: `uniform`, h = 1/steps, an ODE on [0, 1]; `residual`, h = 1, an ordinary residual network (Euler
            only).
        adjoint: how gradients are computed (docs/depth.md compares them). `checkpoint`, exact, stores one state per
            step and recomputes the rest; `selective`, exact, also stores the products with weights; `direct`, exact,
            stores everything; `reversible`, exact, memory independent of the number of steps, with a scheme that needs
            twice the evaluations; `backsolve`, the continuous adjoint, approximate.
        coupling: lambda in (0, 1] of the reversible scheme, 0.99 by default for `reversible`; with `checkpoint`,
            `selective` or `direct` it selects the same scheme, differentiated in that way.
        evaluate: when W(t) is computed, see `qkvflow.depth.fixed`; `auto` chooses what is faster for the weights.
        time_sampling: `jitter` shifts the grid at random in each training step, which then has one additional step, see
            `qkvflow.depth.jitter`.
        rtol, atol: tolerances of adaptive steps (if one is given, the other is the same). WARNING: step sizes depend on
            the whole batch, so the model is not strictly causal, and generation refuses it.
        max_steps: limit on the steps of an adaptive solve, including rejected ones; reaching it is an error. 256 by
            default. The solve backwards of `backsolve` has no limit.
        kinetic_weight: training adds this times the kinetic energy to the loss, the integral of the mean of (dx/dt)^2
            over tokens and width (OT-Transformer, arXiv 2505.13499); logged as `train/kinetic_energy`.
    """

    solver: str = "euler"
    steps: Steps | StepRange | StepGrowth = 12
    endpoint: str = "right"
    step_size: str = "uniform"
    adjoint: str = "checkpoint"
    coupling: float | None = None
    evaluate: str = "auto"
    time_sampling: str = "fixed"
    rtol: Positive | None = None
    atol: Positive | None = None
    max_steps: Steps | None = None
    kinetic_weight: NotNegative = 0.0

    def __post_init__(self):
        tab = tableau(solver_by_name(self.solver))
        object.__setattr__(self, "steps", _steps(self.steps))
        check_ranges(self)
        for name, choices in (
            ("endpoint", ENDPOINTS),
            ("step_size", STEP_SIZES),
            ("adjoint", ADJOINTS),
            ("evaluate", EVALUATE),
            ("time_sampling", TIME_SAMPLING),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}: {getattr(self, name)!r} is not known. Choices: {', '.join(choices)}.")
        if self.step_size == "residual" and tab.stages > 1:
            raise UserError(
                f"step_size: residual is a plain residual network, x + B(x), and has no meaning for {self.solver}, a"
                f" method with {tab.stages} stages. Use solver: euler, or step_size: uniform."
            )
        if self.step_size == "residual" and (self.time_sampling == "jitter" or not isinstance(self.steps, int)):
            raise UserError(
                "step_size: residual has steps of length 1, whose number and positions cannot be random or grow. Use"
                " step_size: uniform."
            )
        if self.kinetic_weight and self.adjoint == "reversible":
            raise UserError(
                "kinetic_weight needs the states after all steps, which adjoint: reversible does not keep: use adjoint:"
                " checkpoint, or leave it out."
            )
        self._check_combination()
        self.plan("in_scan")  # plans check themselves

    @property
    def is_adaptive(self) -> bool:
        """Whether step lengths follow the state."""
        return self.rtol is not None or self.atol is not None

    @property
    def is_general(self) -> bool:
        """Whether diffrax's own loop is used, which has no jitter, no range of steps and no batched weights."""
        return self.is_adaptive or self.adjoint == "backsolve"

    @property
    def reading_steps(self) -> int:
        """The number of steps outside training."""
        return self.steps if isinstance(self.steps, int) else self.steps.reading

    @property
    def stages(self) -> tuple["DepthConfig", ...]:
        """The depth of each stage of training: itself alone, unless it grows."""
        if not isinstance(self.steps, StepGrowth):
            return (self,)
        return tuple(dataclasses.replace(self, steps=steps) for steps in self.steps.values)

    def first_steps(self, num_train_steps: int) -> tuple[int, ...]:
        """The training step, counted from 0, with which each stage begins."""
        return self.steps.first_steps(num_train_steps) if isinstance(self.steps, StepGrowth) else (0,)

    def reached(self, step: int, num_train_steps: int) -> "DepthConfig":
        """The depth as it was in a training step, counted from 0, where it grows; else itself."""
        steps = self.steps.at(step, num_train_steps) if isinstance(self.steps, StepGrowth) else self.reading_steps
        return self if steps == self.reading_steps else self.on_grid(steps)

    def plan(self, evaluate: str) -> AbstractPlan:
        """The plan outside training; `evaluate` (`batched` or `in_scan`) is what `auto` stands for here."""
        steps = self.reading_steps
        if self.is_adaptive:
            rtol, atol = (b if a is None else a for a, b in ((self.rtol, self.atol), (self.atol, self.rtol)))
            tolerances = Tolerances(rtol, atol, MAX_STEPS if self.max_steps is None else self.max_steps)
            return AdaptivePlan(self.solver, steps, tolerances, self.adjoint)
        if self.adjoint == "backsolve":
            return BacksolvePlan(self.solver, steps, self.endpoint)
        return self._fixed(evaluate, steps)

    def training_plans(self, evaluate: str) -> tuple[FixedPlan, ...]:
        """The plans of which one is drawn for each training batch, in the last stage of one that grows; none if
        training is done with `plan`."""
        is_range, is_jittered = isinstance(self.steps, StepRange), self.time_sampling == "jitter"
        if not (is_range or is_jittered):
            return ()
        values = self.steps.values if isinstance(self.steps, StepRange) else (self.reading_steps,)
        return tuple(self._fixed(evaluate, steps + is_jittered, is_jittered) for steps in values)

    def on_grid(self, steps: int | None = None, **changes) -> "DepthConfig":
        """The same flow on a fixed grid of `steps` steps (default: `reading_steps`), nothing drawn at random."""
        fixed = {"rtol": None, "atol": None, "max_steps": None, "time_sampling": "fixed", "kinetic_weight": 0.0}
        adjoint = "checkpoint" if self.adjoint == "backsolve" else self.adjoint
        steps = self.reading_steps if steps is None else steps
        return dataclasses.replace(self, steps=steps, **{"adjoint": adjoint, **fixed, **changes})

    def _fixed(self, evaluate: str, steps: int, jitter: bool = False) -> FixedPlan:
        coupling = COUPLING if self.adjoint == "reversible" and self.coupling is None else self.coupling
        return FixedPlan(
            grid=StepGrid(tableau(solver_by_name(self.solver)), steps, self.endpoint, coupling),
            step=1.0 / steps if self.step_size == "uniform" else 1.0,
            adjoint=self.adjoint,
            evaluate=evaluate if self.evaluate == "auto" else self.evaluate,
            jitter=jitter,
        )

    def _check_combination(self) -> None:
        """Refuses keys that cannot be combined; plans check their own values."""
        if not self.is_adaptive and self.max_steps is not None:
            raise UserError(
                "max_steps bounds adaptive steps, but this grid is fixed: leave it out, or give rtol and atol."
            )
        if not self.is_general:
            return
        what = "adaptive steps (rtol, atol)" if self.is_adaptive else "adjoint: backsolve"
        if self.coupling is not None:
            raise UserError(
                "coupling is for the reversible scheme on a fixed grid, and has no effect with tolerances or adjoint:"
                " backsolve. Leave it out."
            )
        if self.time_sampling == "jitter" or isinstance(self.steps, StepRange):
            raise UserError(
                f"{what} cannot be combined with random steps: use time_sampling: fixed and one number of steps."
            )
        if isinstance(self.steps, StepGrowth) and self.is_adaptive:
            raise UserError(
                f"steps: grow sets the number of steps, but {what} choose it themselves: give one number of steps (it"
                " sets the first trial step), or leave out rtol and atol."
            )
        if self.kinetic_weight:
            raise UserError(
                f"kinetic_weight sums over the steps of a fixed grid, which {what} does not have: leave it out."
            )
        if self.step_size == "residual":
            raise UserError(
                f"step_size: residual has steps of length 1, but {what} solves an ODE on [0, 1]: use uniform."
            )
        if self.endpoint == "left" and self.is_adaptive:
            raise UserError("endpoint: left is for Euler on a fixed grid; adaptive steps do not use it. Leave it out.")
        if self.evaluate == "batched":
            raise UserError(f"evaluate: batched needs times that are known in advance; with {what} use evaluate: auto.")
