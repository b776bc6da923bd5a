"""A flow: time-dependent weights and a plan, integrated. The one place where weights, block and depth meet."""

import equinox as eqx
from haliax import NamedArray
from haliax.nn.scan import Stacked

from qkvflow.depth import Plan, integrate
from qkvflow.errors import UserError
from qkvflow.time import grid
from qkvflow.weights import PerLayer, at, evaluate


class Flow(eqx.Module):
    """x(0) -> x(1) under dx/dt = B(x; W(t)).

    weights: a block some of whose parts are functions of time; `at(weights, t)` is the block at t.
    """

    weights: eqx.Module
    plan: Plan = eqx.field(static=True)

    def __call__(self, x: NamedArray, mask, *, control: NamedArray | None = None, key=None, trajectory: bool = False):
        """x(1); with `trajectory` also the states after each step, {layers, ...}."""
        signal = {} if control is None else {"control": control}

        def field(block, x, key):
            return block(x, mask, key=key, **signal)

        return integrate(field, lambda t: evaluate(self.weights, t), x, self.plan, key=key, trajectory=trajectory)

    def discretise(self, plan: Plan) -> "Flow":
        """The same flow with its weights evaluated once and for all at the times of `plan`."""
        return Flow(PerLayer.stack(at(self.weights, grid(plan.times)), plan.times), plan)

    @property
    def blocks(self) -> Stacked:
        """The stack of ordinary blocks, for per-layer weights."""
        if not isinstance(self.weights, PerLayer):
            raise UserError("These weights are functions of time, not a stack of blocks: call discretise(steps) first.")
        return self.weights.blocks
