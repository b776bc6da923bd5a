"""The general solver path: `diffrax.diffeqsolve`, for adaptive step sizes and for the continuous adjoint.

Everything with a gradient travels through diffrax's `args` as raw arrays, never through a closure: the continuous
adjoint would silently drop it. The state is a raw array too (a NamedArray cannot be one); this is the only file that
unwraps it. It is float32 at least, since diffrax promotes the state to the dtype of t.

Step sizes depend on the error of the whole batch of sequences: changing one token changes every state slightly,
including those before it. So an adaptive flow is not strictly causal and cannot be cached.
"""

from dataclasses import dataclass
from typing import ClassVar

import diffrax
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS
from qkvflow.depth.grid import StepGrid
from qkvflow.depth.plan import AbstractPlan, At, Field, Solution, Statistics, Watch
from qkvflow.depth.solvers import has_error_estimate, solver_by_name, tableau
from qkvflow.depth.steps import pair_dtype
from qkvflow.errors import UserError

_SHORTEST = 1e-6  # length of a step of `backsolve`'s solve backwards


@dataclass(frozen=True)
class Tolerances:
    """A step is accepted if its estimated error is below atol + rtol |x|, in the root mean square over the state."""

    rtol: float
    atol: float
    max_steps: int

    def __post_init__(self):
        for name in ("rtol", "atol"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.max_steps < 1:
            raise UserError(f"max_steps must be at least 1, got {self.max_steps}.")


@dataclass(frozen=True)
class AdaptivePlan(AbstractPlan):
    """Steps of lengths that the error of the state decides.

    Attributes:
        steps: the first step tried has the length 1/steps; the trajectory is read at the ends of as many equal steps.
        adjoint: checkpoint, direct or backsolve.
    """

    solver: str
    steps: int
    tolerances: Tolerances
    adjoint: str = "checkpoint"

    grid: ClassVar[None] = None
    evaluations: ClassVar[None] = None
    recomputed: ClassVar[None] = None
    weight_evaluations: ClassVar[None] = None

    def __post_init__(self):
        if not has_error_estimate(solver_by_name(self.solver)):
            raise UserError(
                f"rtol, atol: {self.solver} does not estimate its error, so its steps are fixed. Leave the tolerances"
                " out, or use solver: tsit5 (or another that adapts: midpoint, heun, ralston, bosh3, dopri5, dopri8)."
            )
        if self.adjoint in ("reversible", "selective"):
            why = {"reversible": "steps back along", "selective": "keeps products for each step of"}[self.adjoint]
            raise UserError(
                f"adjoint: {self.adjoint} {why} a fixed grid; with tolerances use adjoint: checkpoint, or leave"
                " out rtol and atol."
            )

    def solve(
        self,
        field: Field,
        at: At,
        params,
        x: NamedArray,
        *,
        args=None,
        key=None,
        trajectory: bool = False,
        kinetic: bool = False,
        watch: Watch | None = None,
    ) -> Solution:
        """See `AbstractPlan.solve`. Dropout is drawn once per solve.

        Raises:
            UserError: if max_steps is hit outside jit. Inside jit the result is NaN, which the training loop and the
                evaluation report, and `Statistics.successful` is False.
        """
        assert not kinetic, "DepthConfig refuses kinetic_weight here"
        assert watch is None, "qkvflow.lens refuses plans that find their own steps"
        controller = diffrax.PIDController(rtol=self.tolerances.rtol, atol=self.tolerances.atol)
        options = {"stepsize_controller": controller, "max_steps": self.tolerances.max_steps}
        return _diffeqsolve(self, field, at, params, x, args, key, trajectory, adjoint=self._diffrax_adjoint, **options)

    @property
    def times(self) -> tuple[float, ...]:
        return _ends(self.steps)

    @property
    def _diffrax_adjoint(self) -> diffrax.AbstractAdjoint:
        if self.adjoint == "direct":
            return diffrax.DirectAdjoint()
        if self.adjoint == "checkpoint":
            return diffrax.RecursiveCheckpointAdjoint()
        # The adjoint of the parameters is a plain integral: leaving it out of the error estimate saves steps.
        options = {"norm": diffrax.adjoint_rms_seminorm, "dtmin": _SHORTEST, "force_dtmin": True}
        controller = diffrax.PIDController(rtol=self.tolerances.rtol, atol=self.tolerances.atol, **options)
        # At `max_steps` diffrax would take the state that it has reached for the end, and the gradient would be wrong
        # without a sign of it. With steps of at least `_SHORTEST` the solve ends; one that blows up gives NaN.
        return diffrax.BacksolveAdjoint(stepsize_controller=controller, max_steps=None)


@dataclass(frozen=True)
class BacksolvePlan(AbstractPlan):
    """`steps` equal steps by diffrax, differentiated by its continuous adjoint: memory of one state, approximate."""

    solver: str
    steps: int
    endpoint: str = "right"

    def __post_init__(self):
        if self.endpoint == "right" and self.solver == "euler":
            raise UserError(
                "adjoint: backsolve comes from diffrax, whose Euler evaluates the left end of a step: set endpoint:"
                " left, or use another solver."
            )

    def solve(
        self,
        field: Field,
        at: At,
        params,
        x: NamedArray,
        *,
        args=None,
        key=None,
        trajectory: bool = False,
        kinetic: bool = False,
        watch: Watch | None = None,
    ) -> Solution:
        """See `AbstractPlan.solve`. Dropout is drawn once per solve."""
        assert not kinetic, "DepthConfig refuses kinetic_weight here"
        assert watch is None, "qkvflow.lens refuses plans that find their own steps"
        # One step more than needed: the sum of the lengths may fall short of 1 by rounding.
        options = {"stepsize_controller": diffrax.ConstantStepSize(), "max_steps": self.steps + 1}
        adjoint = diffrax.BacksolveAdjoint()
        return _diffeqsolve(self, field, at, params, x, args, key, trajectory, adjoint=adjoint, **options)

    @property
    def times(self) -> tuple[float, ...]:
        return self.grid.times

    @property
    def grid(self) -> StepGrid:
        return StepGrid(tableau(solver_by_name(self.solver)), self.steps, self.endpoint)

    @property
    def field_step(self) -> float:
        return 1.0 / self.steps if self.grid.tableau.stages == 1 else 0.0

    @property
    def evaluations(self) -> int:
        return _evaluations(self.solver, self.steps)

    @property
    def recomputed(self) -> int:
        return self.evaluations

    @property
    def weight_evaluations(self) -> int:
        return self.evaluations


def _diffeqsolve(
    plan: AdaptivePlan | BacksolvePlan,
    field: Field,
    at: At,
    params,
    x: NamedArray,
    args,
    key,
    trajectory: bool,
    *,
    adjoint: diffrax.AbstractAdjoint,
    stepsize_controller: diffrax.AbstractStepSizeController,
    max_steps: int,
) -> Solution:
    arrays, static = eqx.partition((params, args, key), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    dtype, axes = x.dtype, x.axes

    def vector_field(t, y, leaves):
        params, args, key = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        return field(at(params, t), hax.named(y, axes).astype(dtype), args, key).rearrange(axes).array.astype(y.dtype)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver_by_name(plan.solver),
        t0=0.0,
        t1=1.0,
        dt0=1.0 / plan.steps,
        y0=x.array.astype(pair_dtype(dtype)),
        args=leaves,
        saveat=diffrax.SaveAt(ts=_ends(plan.steps)) if trajectory else diffrax.SaveAt(t1=True),
        stepsize_controller=stepsize_controller,
        adjoint=adjoint,
        max_steps=max_steps,
        throw=False,  # diffrax's own check is a call from the device to the host, which may hang on several devices
    )
    successful = solution.result == diffrax.RESULTS.successful
    if not isinstance(successful, jax.core.Tracer) and not bool(successful):
        raise UserError(
            f"the solver took max_steps ({max_steps}) steps without reaching t = 1: raise depth.max_steps, or loosen"
            " depth.rtol and depth.atol."
        )
    states = hax.named(solution.ys, (Axis(LAYERS, solution.ys.shape[0]), *axes))
    states = hax.where(successful, states, jnp.nan).astype(dtype)
    x1 = hax.auto_sharded(states[LAYERS, -1])
    taken, rejected = solution.stats["num_steps"], solution.stats["num_rejected_steps"]
    statistics = Statistics(taken, rejected, _evaluations(plan.solver, taken), successful)
    adaptive = plan.evaluations is None
    return Solution(x1, states if trajectory else None, statistics if adaptive else None)


def _ends(steps: int) -> tuple[float, ...]:
    return tuple(k / steps for k in range(1, steps + 1))


def _evaluations(solver: str, steps):
    """Evaluations of the vector field that diffrax makes in `steps` steps, rejected ones included."""
    instance = solver_by_name(solver)
    if isinstance(instance, diffrax.Euler):
        return steps
    stages = instance.tableau.num_stages
    # The last stage of an FSAL method is the first of the next step, also after a rejected one.
    return steps * (stages - 1) + 1 if instance.tableau.fsal else steps * stages
