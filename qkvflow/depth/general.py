"""The general path: `diffrax.diffeqsolve`, for adaptive step sizes and for the continuous adjoint.

Everything with a gradient travels through diffrax's `args` as raw arrays, never through a closure: the continuous
adjoint would silently drop it. The state is a raw array too (a NamedArray cannot be one); this is the only file that
unwraps it. It is float32 at least, since diffrax promotes the state to the dtype of t.

Step sizes are chosen from the error of the whole batch of sequences: change one token and every state changes a
little, those before it too. So an adaptive flow is not strictly causal and cannot be cached.
"""

from dataclasses import dataclass

import diffrax
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS
from qkvflow.depth.fixed import At, Field
from qkvflow.depth.solvers import solver_by_name
from qkvflow.depth.steps import pair_dtype
from qkvflow.errors import UserError


@dataclass(frozen=True)
class Tolerances:
    """A step is accepted if its estimated error is below atol + rtol |x|, in the root mean square over the state."""

    rtol: float
    atol: float
    max_steps: int


@dataclass(frozen=True)
class GeneralPlan:
    """How `diffeqsolve` travels from t = 0 to 1.

    steps: fixed steps of length 1/steps; with tolerances the first step tried has this length.
    tolerances: None for fixed steps.
    adjoint: checkpoint, direct or backsolve.
    """

    solver: str
    steps: int
    tolerances: Tolerances | None
    adjoint: str

    @property
    def times(self) -> tuple[float, ...]:
        """The ends of the steps of the grid on which `trajectory` is read, k/steps for k = 1..steps."""
        return tuple(k / self.steps for k in range(1, self.steps + 1))

    @property
    def evaluations(self) -> int | None:
        """Evaluations of the vector field from t = 0 to 1; None if that depends on the state."""
        return None if self.tolerances is not None else evaluations(self.solver, self.steps)


class Statistics(eqx.Module):
    """What a solve cost.

    steps: tried, those rejected included. evaluations: of the vector field; one more was made each time that the very
    first step was rejected. successful: False if max_steps was hit.
    """

    steps: jax.Array
    rejected: jax.Array
    evaluations: jax.Array
    successful: jax.Array


def solve(field: Field, at: At, params, x: NamedArray, plan: GeneralPlan, *, args=None, key=None, trajectory=False):
    """Like `qkvflow.depth.fixed.integrate`, but by diffrax; dropout is drawn once per solve.

    Returns:
        x(1), or (x(1), states at `plan.times` with the axis `layers` in front), and the `Statistics`.

    Errors: UserError if max_steps is hit outside jit. Inside jit the result is NaN, which the training loop and the
    evaluation report, and `Statistics.successful` is False.
    """
    arrays, static = eqx.partition((params, args, key), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    dtype, axes = x.dtype, x.axes

    def vector_field(t, y, leaves):
        params, args, key = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        return field(at(params, t), hax.named(y, axes).astype(dtype), args, key).rearrange(axes).array.astype(y.dtype)

    tolerances = plan.tolerances
    controller = diffrax.ConstantStepSize()
    if tolerances is not None:
        controller = diffrax.PIDController(rtol=tolerances.rtol, atol=tolerances.atol)
    # With fixed steps one more than needed: the sum of the lengths may fall short of 1 by rounding.
    max_steps = plan.steps + 1 if tolerances is None else tolerances.max_steps
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver_by_name(plan.solver),
        t0=0.0,
        t1=1.0,
        dt0=1.0 / plan.steps,
        y0=x.array.astype(pair_dtype(dtype)),
        args=leaves,
        saveat=diffrax.SaveAt(ts=plan.times) if trajectory else diffrax.SaveAt(t1=True),
        stepsize_controller=controller,
        adjoint=_adjoint(plan),
        max_steps=max_steps,
        throw=False,  # diffrax's own check is a call from the device to the host, which may hang on several devices
    )
    successful = solution.result == diffrax.RESULTS.successful
    if not isinstance(successful, jax.core.Tracer) and not bool(successful):
        raise UserError(
            f"the solver took max_steps ({max_steps}) steps and did not reach t = 1: raise depth.max_steps, or"
            " loosen depth.rtol and depth.atol."
        )
    states = hax.named(solution.ys, (Axis(LAYERS, solution.ys.shape[0]), *axes))
    states = hax.where(successful, states, jnp.nan).astype(dtype)
    x1 = hax.auto_sharded(states[LAYERS, -1])
    taken, rejected = solution.stats["num_steps"], solution.stats["num_rejected_steps"]
    statistics = Statistics(taken, rejected, evaluations(plan.solver, taken), successful)
    return ((x1, states) if trajectory else x1), statistics


def evaluations(solver: str, steps):
    """Evaluations of the vector field that diffrax makes in `steps` steps, rejected ones included."""
    instance = solver_by_name(solver)
    if isinstance(instance, diffrax.Euler):
        return steps
    stages = instance.tableau.num_stages
    # The last stage of an FSAL method is the first of the next step, also after a rejected one.
    return steps * (stages - 1) + 1 if instance.tableau.fsal else steps * stages


def _adjoint(plan: GeneralPlan) -> diffrax.AbstractAdjoint:
    if plan.adjoint == "direct":
        return diffrax.DirectAdjoint()
    if plan.adjoint == "checkpoint":
        return diffrax.RecursiveCheckpointAdjoint()
    if plan.tolerances is None:
        return diffrax.BacksolveAdjoint()
    # The adjoint of the parameters is a plain integral: leaving it out of the error estimate saves steps.
    norm = diffrax.adjoint_rms_seminorm
    tolerances = plan.tolerances
    return diffrax.BacksolveAdjoint(
        stepsize_controller=diffrax.PIDController(rtol=tolerances.rtol, atol=tolerances.atol, norm=norm)
    )
