"""A flow: time-dependent weights and a plan, integrated. The one place where weights, block and depth meet."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn.scan import Stacked
from jaxtyping import PRNGKeyArray

from qkvflow.blocks import Inputs
from qkvflow.depth import AbstractPlan, FixedPlan, Solution, increment
from qkvflow.errors import UserError
from qkvflow.time import GridPoint, grid
from qkvflow.weights import PerLayer, at, evaluate


class Flow(eqx.Module):
    """x(0) -> x(1) under dx/dt = B(x; W(t)).

    Attributes:
        weights: a block some of whose parts are functions of time; `at(weights, t)` is the block at t.
        plan: how it is evaluated outside training, and in training too if there are no `training_plans`, of which one
            is drawn for each call that has a key.
        kinetic: in training mode a solve also gives its kinetic energy.
        grid_key: key of the number of steps and the jitter, in place of the key of the call. The parts of a batch whose
            gradients are accumulated have the same one, and so share a grid. None: the key of the call.
    """

    weights: eqx.Module
    plan: AbstractPlan = eqx.field(static=True)
    training_plans: tuple[FixedPlan, ...] = eqx.field(static=True, default=())
    kinetic: bool = eqx.field(static=True, default=False)
    inference: bool = False
    grid_key: PRNGKeyArray | None = None

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        """x(1), with the axes of x."""
        return self.solve(x, inputs, key=key).end

    def solve(self, x: NamedArray, inputs: Inputs, *, key=None, trajectory: bool = False) -> Solution:
        """x(1); with `trajectory` also the states after each step, {layers, ...}; and what the solve cost."""
        kinetic, plan = self.kinetic and not self.inference, self.plan
        if not self.training_plans or self.inference or key is None or trajectory:
            options = {"key": key, "trajectory": trajectory, "kinetic": kinetic}
            inputs = inputs.in_step(plan.field_step)
            if inputs.probe is not None:
                x = inputs.see("state.0", x)
                inputs = inputs.probed_by(inputs.probe.steps(plan.steps, plan.evaluations))
                options["watch"] = inputs.probe
            return plan.solve(_field, evaluate, self.weights, x, args=inputs, **options)
        return self._training(x, inputs, key, kinetic)

    def increment(self, k, x: NamedArray, inputs: Inputs) -> NamedArray:
        """What step `k` of the grid (may be traced) adds to the state `x`, by the solver's plain step."""
        plan = self.plan
        rows, inputs = jnp.asarray(plan.grid.time_rows)[k], inputs.in_step(plan.field_step)

        def field(slot: int, x: NamedArray) -> NamedArray:
            return _field(evaluate(self.weights, GridPoint(plan.times, rows[slot])), x, inputs, None)

        return increment(field, x, plan.grid, plan.step)

    def discretise(self, plan: FixedPlan) -> "Flow":
        """The same flow with its weights evaluated once and for all at the times of `plan`."""
        return Flow(PerLayer.stack(at(self.weights, grid(plan.times)), plan.times), plan)

    @property
    def blocks(self) -> Stacked:
        """The stack of ordinary blocks, for per-layer weights."""
        if not isinstance(self.weights, PerLayer):
            raise UserError("These weights are functions of time, not a stack of blocks: call discretise(steps) first.")
        return self.weights.blocks

    def _training(self, x: NamedArray, inputs: Inputs, key, kinetic: bool) -> Solution:
        """By a plan drawn from `training_plans`."""
        (k_plan, key), k_grid = jax.random.split(key), None
        if self.grid_key is not None:
            k_plan, k_grid = jax.random.split(self.grid_key)

        def branch(plan: FixedPlan):
            args = inputs.in_step(plan.field_step)
            options = {"args": args, "kinetic": kinetic, "grid_key": k_grid}
            return lambda x, key: plan.solve(_field, evaluate, self.weights, x, key=key, **options)

        branches = [branch(plan) for plan in self.training_plans]
        if len(branches) == 1:
            return branches[0](x, key)
        drawn = jax.random.randint(k_plan, (), 0, len(branches))
        solution = jax.lax.switch(drawn, branches, x, key)
        return dataclasses.replace(
            solution, steps=jnp.asarray([plan.steps - plan.jitter for plan in self.training_plans])[drawn]
        )


def _field(block, x: NamedArray, inputs: Inputs, key) -> NamedArray:
    return inputs.see("out", block(inputs.see("in", x), inputs, key=key))
