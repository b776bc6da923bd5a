"""A flow: time-dependent weights and a plan, integrated. The one place where weights, block and depth meet."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn.scan import Stacked

from qkvflow.depth import GeneralPlan, Plan, Statistics, increment, integrate, solve
from qkvflow.errors import UserError
from qkvflow.time import GridPoint, grid
from qkvflow.weights import PerLayer, at, evaluate


class Flow(eqx.Module):
    """x(0) -> x(1) under dx/dt = B(x; W(t)).

    weights: a block some of whose parts are functions of time; `at(weights, t)` is the block at t.
    plan: how it is read outside training, and in training too if there are no `training_plans`, of which one is drawn
        for each call that has a key.
    """

    weights: eqx.Module
    plan: Plan | GeneralPlan = eqx.field(static=True)
    training_plans: tuple[Plan, ...] = eqx.field(static=True, default=())
    inference: bool = False

    def __call__(self, x: NamedArray, mask, *, key=None, trajectory: bool = False, **inputs: NamedArray | None):
        """x(1); with `trajectory` also the states after each step, {layers, ...}.

        inputs: what else the block takes: `pos_ids` (rotary positions; by default 0, 1, 2, ...), `control`.
        """
        return self.solve(x, mask, key=key, trajectory=trajectory, **inputs)[0]

    def solve(
        self, x: NamedArray, mask, *, key=None, trajectory: bool = False, **inputs: NamedArray | None
    ) -> tuple[Any, Statistics | None]:
        """What calling the flow gives, and what the solve cost: None on a fixed grid, whose plan says it."""
        args = (mask, {name: value for name, value in inputs.items() if value is not None})
        options = {"args": args, "key": key, "trajectory": trajectory}
        if isinstance(self.plan, GeneralPlan):
            return solve(_field, evaluate, self.weights, x, self.plan, **options)
        if not self.training_plans or self.inference or key is None or trajectory:
            return integrate(_field, evaluate, self.weights, x, self.plan, **options), None
        return self._training(x, args, key), None

    def solve_statistics(self, x: NamedArray, mask, *, key=None, **inputs: NamedArray | None) -> Statistics:
        """What the solve from x(0) = `x` costs; of interest for adaptive steps. Makes the whole solve."""
        statistics = self.solve(x, mask, key=key, **inputs)[1]
        if statistics is None:
            raise UserError("This flow has a fixed grid: its plan says what a solve costs (`plan.evaluations`).")
        return statistics

    def increment(self, k, x: NamedArray, mask, **inputs: NamedArray | None) -> NamedArray:
        """What step `k` of the grid (may be traced) adds to the state `x`, by the solver's plain step."""
        args = (mask, {name: value for name, value in inputs.items() if value is not None})
        rows = jnp.asarray(self.plan.time_rows)[k]

        def field(slot: int, x: NamedArray) -> NamedArray:
            return _field(evaluate(self.weights, GridPoint(self.plan.times, rows[slot])), x, args, None)

        return increment(field, x, self.plan, self.plan.step)

    def discretise(self, plan: Plan) -> "Flow":
        """The same flow with its weights evaluated once and for all at the times of `plan`."""
        return Flow(PerLayer.stack(at(self.weights, grid(plan.times)), plan.times), plan)

    @property
    def blocks(self) -> Stacked:
        """The stack of ordinary blocks, for per-layer weights."""
        if not isinstance(self.weights, PerLayer):
            raise UserError("These weights are functions of time, not a stack of blocks: call discretise(steps) first.")
        return self.weights.blocks

    def _training(self, x: NamedArray, args, key) -> NamedArray:
        """x(1) by a plan drawn from `training_plans`."""
        k_plan, key = jax.random.split(key)
        branches = [
            lambda x, key, plan=plan: integrate(_field, evaluate, self.weights, x, plan, args=args, key=key)
            for plan in self.training_plans
        ]
        if len(branches) == 1:
            return branches[0](x, key)
        return jax.lax.switch(jax.random.randint(k_plan, (), 0, len(branches)), branches, x, key)


def _field(block, x: NamedArray, args, key) -> NamedArray:
    mask, inputs = args
    return block(x, mask, key=key, **inputs)
