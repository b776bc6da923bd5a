"""The grid of a fixed-step solver: where in layer-time it evaluates the vector field, decided once, used everywhere.

Step k = 0..L-1 covers [k/L, (k+1)/L]. A stage at place c sees t = (k + c)/L. Euler has one stage, and `endpoint`
says which end of its step it sees: `right` (k+1)/L as in the paper, `left` k/L as in diffrax.
Steps are integers, never reciprocals: int(1/(1/93)) is 92 in floating point.

With `coupling` the step is that of an algebraically reversible scheme (see `qkvflow.depth.steps`), which also looks
back: a stage at place c is seen at (k + c)/L and at (k + 1 - c)/L. Euler looks back at the time it saw going forward.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from qkvflow.depth.solvers import Tableau


@dataclass(frozen=True)
class StepGrid:
    """`steps` equal steps from t = 0 to 1, each with the stages of `tableau`.

    Attributes:
        coupling: lambda of the reversible scheme; None for the solver's own step.
    """

    tableau: Tableau
    steps: int
    endpoint: str = "right"
    coupling: float | None = None

    @cached_property
    def places(self) -> tuple[Fraction, ...]:
        """The distinct places of the stages within a step, ascending."""
        backward = self._backward_places if self.coupling is not None else ()
        return tuple(sorted({*self._stage_places, *backward}))

    @cached_property
    def stage_slots(self) -> tuple[int, ...]:
        """For each stage, the index of its place in `places`."""
        return tuple(self.places.index(c) for c in self._stage_places)

    @cached_property
    def backward_slots(self) -> tuple[int, ...]:
        """The same for a step of length -h from the end of the step (the reversible scheme has one)."""
        return tuple(self.places.index(c) for c in self._backward_places)

    @cached_property
    def times(self) -> tuple[float, ...]:
        """All distinct times at which the vector field is evaluated, ascending; float64, to 1e-12."""
        return tuple(float(t) for t in self._exact_times)

    @cached_property
    def time_rows(self) -> tuple[tuple[int, ...], ...]:
        """`time_rows[k][slot]`: the index into `times` for step k and place `slot`."""
        row = {t: i for i, t in enumerate(self._exact_times)}
        return tuple(tuple(row[self._exact(k, c)] for c in self.places) for k in range(self.steps))

    @property
    def evaluations(self) -> int:
        """Evaluations of the vector field from t = 0 to 1, in the order of steps and stages."""
        return self.steps * self.tableau.stages * (1 if self.coupling is None else 2)

    @cached_property
    def _stage_places(self) -> tuple[Fraction, ...]:
        if self.tableau.stages == 1:
            return (Fraction(1 if self.endpoint == "right" else 0),)
        # Places like 8/9 are stored as floats; limiting the denominator recovers the fraction of the tableau.
        return tuple(Fraction(c).limit_denominator(10**6) for c in self.tableau.c)

    @cached_property
    def _backward_places(self) -> tuple[Fraction, ...]:
        if self.tableau.stages == 1:
            return self._stage_places
        return tuple(1 - c for c in self._stage_places)

    @cached_property
    def _exact_times(self) -> tuple[Fraction, ...]:
        return tuple(sorted({self._exact(k, c) for k in range(self.steps) for c in self.places}))

    def _exact(self, k: int, place: Fraction) -> Fraction:
        return (k + place) / self.steps
