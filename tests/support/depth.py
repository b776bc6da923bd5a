"""Plans, and a field whose solution shows the order of a method."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from qkvflow.depth import DepthConfig, FixedPlan
from qkvflow.time import Grid

ORDER = {
    "euler": 1,
    "midpoint": 2,
    "heun": 2,
    "ralston": 2,
    "rk4": 4,
    "bosh3": 3,
    "tsit5": 5,
    "dopri5": 5,
    "dopri8": 8,
}
Embed = Axis("embed", 4)


def plan(solver="euler", steps=4, evaluate="in_scan", **kwargs) -> FixedPlan:
    return DepthConfig(solver=solver, steps=steps, evaluate=evaluate, **kwargs).plan("in_scan")


def times_of(params, t):
    """Stands in for weights: W(t) = t itself, exact, in the default float type."""
    values = jnp.asarray(np.asarray(t.values))
    if isinstance(t, Grid):
        return hax.named(values, t.axis)
    return hax.named(values[t.index], ())


def rotation(scale):
    rng = np.random.default_rng(0)
    x0 = hax.named(jnp.asarray(rng.normal(size=4)), Embed)
    a, b = (hax.named(jnp.asarray(m - m.T) * scale, ("out", "embed")) for m in rng.normal(size=(2, 4, 4)))
    return (lambda t, x, args, key: hax.dot(a + t * b, x, axis="embed").rename({"out": "embed"})), x0


def slope(field, x0, reference, solver, steps, **kwargs):
    plans = [plan(solver, n, **kwargs) for n in steps]
    errors = [float(jnp.abs(p.solve(field, times_of, None, x0).end.array - reference).max()) for p in plans]
    return np.polyfit(np.log(1 / np.asarray(steps)), np.log(errors), 1)[0]
