"""Solvers by name. Each is a diffrax solver; explicit Runge-Kutta methods are stepped from their Butcher tableau.

k_i = f(t + c_i h, x + h sum_j a_ij k_j),    x' = x + h sum_i b_i k_i
"""

from dataclasses import dataclass
from typing import ClassVar

import diffrax
import numpy as np

from qkvflow.errors import UserError


class RK4(diffrax.AbstractERK):
    """The classic 4th order Runge-Kutta method (Kutta 1901), which diffrax lacks. 4 stages, fixed steps only."""

    # b_error must sum to 0; without an embedded method the estimate is 0 and means nothing.
    tableau: ClassVar[diffrax.ButcherTableau] = diffrax.ButcherTableau(
        a_lower=(np.array([1 / 2]), np.array([0.0, 1 / 2]), np.array([0.0, 0.0, 1.0])),
        b_sol=np.array([1 / 6, 1 / 3, 1 / 3, 1 / 6]),
        b_error=np.zeros(4),
        c=np.array([1 / 2, 1 / 2, 1.0]),
    )
    interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms):
        del terms
        return 4


SOLVERS: dict[str, type[diffrax.AbstractSolver]] = {
    "euler": diffrax.Euler,
    "midpoint": diffrax.Midpoint,
    "heun": diffrax.Heun,
    "ralston": diffrax.Ralston,
    "rk4": RK4,
    "bosh3": diffrax.Bosh3,
    "tsit5": diffrax.Tsit5,
    "dopri5": diffrax.Dopri5,
    "dopri8": diffrax.Dopri8,
}
"""The values of `depth.solver`."""


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta step: the stages that the result needs, as plain numbers.

    `c[i]`: place of stage i in the step, `a[i][j]`, `b[i]` its weights. Stages that only estimate an error or that
    are handed to the next step (FSAL) are left out: on a fixed grid nothing reads them.
    """

    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    @property
    def stages(self) -> int:
        """Evaluations of the vector field per step."""
        return len(self.b)


def solver_by_name(name: str) -> diffrax.AbstractSolver:
    """The diffrax solver called `name`. Raises UserError, listing the names, if there is none."""
    if name not in SOLVERS:
        raise UserError(f"solver: {name!r} is not known. Choices: {', '.join(SOLVERS)}.")
    return SOLVERS[name]()


def tableau(solver: diffrax.AbstractSolver) -> Tableau:
    """The tableau of an explicit solver. Raises UserError for a solver that has none (implicit, multi-step)."""
    if isinstance(solver, diffrax.Euler):
        return Tableau((0.0,), ((),), (1.0,))
    if not isinstance(solver, diffrax.AbstractERK):
        raise UserError(
            f"{type(solver).__name__} is not an explicit Runge-Kutta method, so it cannot be stepped on a fixed grid."
            f" Choices: {', '.join(SOLVERS)}."
        )
    tab = solver.tableau
    a = [(), *(tuple(float(v) for v in row) for row in tab.a_lower)]
    b = [float(v) for v in tab.b_sol]
    c = [float(tab.c1), *(float(v) for v in tab.c)]
    needed = {i for i, weight in enumerate(b) if weight != 0.0}
    for i in reversed(range(len(b))):
        if i in needed:
            needed |= {j for j, weight in enumerate(a[i]) if weight != 0.0}
    keep = sorted(needed)
    return Tableau(
        tuple(c[i] for i in keep),
        tuple(tuple(a[i][j] for j in keep if j < i) for i in keep),
        tuple(b[i] for i in keep),
    )


def has_error_estimate(solver: diffrax.AbstractSolver) -> bool:
    """Whether the solver can adapt its steps: whether it has an embedded method."""
    return isinstance(solver, diffrax.AbstractERK) and bool(np.any(solver.tableau.b_error))
