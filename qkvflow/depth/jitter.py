"""`time_sampling: jitter`: a grid in depth whose first step has a random length, so that training covers all times.

With d uniform in (0, 1/L) the grid is 0, d, d + 1/L, ..., d + (L-1)/L, 1: L + 1 steps, all of length 1/L but the
first (d) and the last (1/L - d). Source: `generate_t` of the official code, which its model never calls.

It is the uniform grid of L + 1 steps, warped: piecewise linear between the ends of the steps, so that a stage at place
c of step k stays at place c of step k. Times are fp32, since they are known at run time only.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from qkvflow.axes import LAYERS
from qkvflow.depth.grid import StepGrid


def jittered(grid: StepGrid, key) -> tuple[NamedArray, jax.Array]:
    """Draws a grid.

    Returns:
        times: the times of `grid` after the warp, {layers}.
        lengths: of the steps, [steps]; they sum to 1.
    """
    inner = grid.steps - 1  # L
    first = jax.random.uniform(key, (), jnp.float32, 0.0, 1.0 / inner)
    ends = jnp.concatenate([jnp.zeros(1), first + np.arange(inner, dtype=np.float32) / inner, jnp.ones(1)])
    uniform = np.arange(grid.steps + 1) / grid.steps
    times = jnp.interp(np.asarray(grid.times), uniform, ends)
    return hax.named(times, Axis(LAYERS, len(grid.times))), jnp.diff(ends)
