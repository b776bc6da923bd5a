"""A plan: how a flow travels from t = 0 to t = 1. The interface of all plans, and their results."""

import abc
from collections.abc import Callable
from typing import Any, Protocol

import equinox as eqx
import jax
from haliax import NamedArray

from qkvflow.depth.grid import StepGrid

At = Callable[[Any, Any], Any]
Field = Callable[[Any, NamedArray, Any, Any], NamedArray]


class Statistics(eqx.Module):
    """The cost of an adaptive solve.

    Attributes:
        steps: attempted steps, rejected ones included.
        rejected: rejected steps.
        evaluations: of the vector field; too low by one for each rejection of the very first step.
        successful: False if max_steps was reached.
    """

    steps: jax.Array
    rejected: jax.Array
    evaluations: jax.Array
    successful: jax.Array


class Solution(eqx.Module):
    """x(1), and optional further results.

    Attributes:
        states: after each step, {layers, ...}; None unless the trajectory was requested.
        statistics: None if the plan knows the cost of a solve in advance.
        kinetic: the integral of the mean of (dx/dt)^2 over all axes of x, fp32, with the mean velocity of each step
            instead of dx/dt: sum_k mean((x_{k+1} - x_k)^2) / (t_{k+1} - t_k). None unless requested.
        steps: the number of steps, if it was drawn at random; without the additional one of jitter.
    """

    end: NamedArray
    states: NamedArray | None = None
    statistics: Statistics | None = None
    kinetic: jax.Array | None = None
    steps: jax.Array | None = None


class Watch(Protocol):
    """Observes the steps of a solve while they are traced, and may change the state after each step."""

    def begin(self, step: jax.Array) -> None:
        """A step, whose number may be traced, begins."""
        ...

    def end(self, x: NamedArray) -> tuple[NamedArray, Any]:
        """The step is over. Gives the state that the solve goes on with, `x` itself if it is not changed, and what was
        seen in the step, any pytree."""
        ...

    def keep(self, seen: Any) -> None:
        """Is given what was seen in all steps, with the axis `steps`."""
        ...


class AbstractPlan(abc.ABC):
    """How a flow is solved. Plans are static: hashable, compared by value, free of arrays.

    Attributes:
        steps: of the grid on which the trajectory is read.
        times: where W(t) is evaluated, ascending; of a plan that finds its own times, the ends of `steps` equal steps.
        grid: the fixed grid of the solver's own steps; None for a plan that finds its own times.
        evaluations: of the vector field from t = 0 to 1; None if that depends on the state, as do the next two.
        recomputed: how many of these the backward pass makes again, at most.
        keeps_products: whether the forward pass stores the products with weights, so that the backward pass
            recomputes everything else.
        weight_evaluations: how many times W(t) is computed in a forward pass.
    """

    steps: int
    times: tuple[float, ...]
    grid: StepGrid | None
    evaluations: int | None
    recomputed: int | None
    keeps_products: bool = False
    weight_evaluations: int | None

    @property
    def field_step(self) -> float:
        """The length h of a step that evaluates the field once, as the state sees it; 0 where a step has several
        stages, or any length. A field that depends on the length of its step (a splitting) is read with it."""
        return 0.0

    @abc.abstractmethod
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
        """x(1) from x(0) = `x` under dx/dt = field(W(t), x, args, key), W(t) = at(params, t).

        Args:
            field: the vector field. Neither it nor `at` may close over anything that has a gradient.
            at: takes `params` and a `Grid` (an axis `layers`), a `GridPoint`, or a traced time.
            params: what the weights are made of; any pytree.
            x: the state; its dtype is kept.
            args: what else the field reads (a mask, a control); any pytree.
            key: for dropout, and for what the plan itself draws.
            trajectory: also give the states after each step.
            kinetic: also give the kinetic energy; on a fixed grid only.
            watch: what looks into the steps; on a fixed grid only.
        """
