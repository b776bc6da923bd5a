"""A plan: where in layer-time a fixed-step solver evaluates the vector field, decided once and used everywhere.

Step k = 0..L-1 covers [k/L, (k+1)/L]. A stage at place c sees t = (k + c)/L. Euler has one stage, and `endpoint`
says which end of its step it sees: `right` (k+1)/L as in the paper, `left` k/L as in diffrax.
Steps are integers, never reciprocals: int(1/(1/93)) is 92 in floating point.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from qkvflow.depth.solvers import Tableau


@dataclass(frozen=True)
class Plan:
    """A fixed grid in depth. `step` is the length h of a step as the state sees it (1/L, or 1 for plain residuals)."""

    tableau: Tableau
    steps: int
    endpoint: str
    step: float
    adjoint: str
    evaluate: str

    @cached_property
    def places(self) -> tuple[Fraction, ...]:
        """The distinct places of the stages within a step, ascending."""
        return tuple(sorted(set(self._stage_places)))

    @cached_property
    def stage_slots(self) -> tuple[int, ...]:
        """For each stage, the index of its place in `places`."""
        return tuple(self.places.index(c) for c in self._stage_places)

    @cached_property
    def times(self) -> tuple[float, ...]:
        """All distinct times at which the vector field is evaluated, ascending; float64, exact to rounding."""
        return tuple(float(t) for t in self._exact_times)

    @cached_property
    def time_rows(self) -> tuple[tuple[int, ...], ...]:
        """`time_rows[k][slot]`: the index into `times` for step k and place `slot`."""
        row = {t: i for i, t in enumerate(self._exact_times)}
        return tuple(tuple(row[self._exact(k, c)] for c in self.places) for k in range(self.steps))

    @property
    def evaluations(self) -> int:
        """Evaluations of the vector field from t = 0 to 1."""
        return self.steps * self.tableau.stages

    @cached_property
    def _stage_places(self) -> tuple[Fraction, ...]:
        if self.tableau.stages == 1:
            return (Fraction(1 if self.endpoint == "right" else 0),)
        # Places like 8/9 are stored as floats; limiting the denominator recovers the fraction of the tableau.
        return tuple(Fraction(c).limit_denominator(10**6) for c in self.tableau.c)

    @cached_property
    def _exact_times(self) -> tuple[Fraction, ...]:
        return tuple(sorted({self._exact(k, c) for k in range(self.steps) for c in self.places}))

    def _exact(self, k: int, place: Fraction) -> Fraction:
        return (k + place) / self.steps
