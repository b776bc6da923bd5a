"""YAML `depth.steps` if it is not a single number: a range to draw from, or a number that grows during training."""

import bisect
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from qkvflow.errors import UserError
from qkvflow.ranges import Range, Steps, check_ranges


@dataclass(frozen=True)
class StepRange:
    """A number of steps drawn for each training batch from `choices` numbers between `min` and `max`, in equal ratios.

    Each is compiled once. Evaluation and everything else outside training uses `max` steps.

    Attributes:
        min, max: the fewest and the most steps.
        choices: the number of values, including both ends.
    """

    min: Steps
    max: Steps
    choices: Annotated[int, Range(at_least=2, at_most=64)] = 3

    def __post_init__(self):
        check_ranges(self)
        if not self.min < self.max:
            raise UserError(f"steps: min ({self.min}) must be below max ({self.max}).")

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of steps, ascending, without repetition."""
        ratio = self.max / self.min
        return tuple(sorted({round(self.min * ratio ** (i / (self.choices - 1))) for i in range(self.choices)}))

    @property
    def reading(self) -> int:
        """The number outside training."""
        return self.max


@dataclass(frozen=True)
class StepGrowth:
    """`{grow: {0.0: 3, 0.25: 6, 0.6: 12}}`: from these fractions of training on, this many steps.

    Parameters and the optimizer's state go on as they are: only the grid on which W(t) is read becomes finer. Each
    stage is compiled once. Evaluation and generation use the last number.

    Attributes:
        grow: fractions of training in [0, 1), the first 0.0, and the steps from there on, strictly increasing.
    """

    grow: Mapping[str, Steps]

    def __post_init__(self):
        if not isinstance(self.grow, Mapping):
            raise UserError(
                f"grow: a mapping from fractions of training to steps, such as {{0.0: 3}}; got {self.grow!r}."
            )
        check_ranges(self)
        try:
            stages = _Stages((float(fraction), steps) for fraction, steps in self.grow.items())
        except (TypeError, ValueError):
            raise UserError(
                f"grow: its keys must be fractions of training in [0, 1), got {', '.join(map(str, self.grow))}."
            ) from None
        if wrong := [n for _, n in stages.pairs if isinstance(n, bool) or not isinstance(n, numbers.Integral)]:
            raise UserError(f"grow: numbers of steps must be whole, got {wrong[0]!r}.")
        fractions = [fraction for fraction, _ in stages.pairs]
        if not fractions or fractions[0] != 0.0:
            first = f"got {fractions[0]:g}" if fractions else "it is empty"
            raise UserError(f"grow: the first fraction must be 0.0, the beginning of training; {first}.")
        if any(not b > a for a, b in itertools.pairwise(fractions)):
            raise UserError(f"grow: the fractions must increase, got {', '.join(f'{f:g}' for f in fractions)}.")
        if not fractions[-1] < 1.0:
            raise UserError(
                f"grow: a stage that begins at {fractions[-1]:g} of training is never trained: fractions must be below"
                " 1."
            )
        if any(not b > a for (_, a), (_, b) in itertools.pairwise(stages.pairs)):
            raise UserError(
                f"grow: the numbers of steps must increase, got {', '.join(str(steps) for _, steps in stages.pairs)}."
            )
        object.__setattr__(self, "grow", stages)

    @property
    def values(self) -> tuple[int, ...]:
        """The number of steps of each stage."""
        return tuple(steps for _, steps in self.grow.pairs)

    @property
    def reading(self) -> int:
        """The number outside training: that of the last stage."""
        return self.values[-1]

    def first_steps(self, num_train_steps: int) -> tuple[int, ...]:
        """The training step, counted from 0, with which each stage begins.

        Raises:
            UserError: if training is too short, so that a stage has no step.
        """
        first = tuple(_first_step(fraction, num_train_steps) for fraction, _ in self.grow.pairs)
        for i, (a, b) in enumerate(zip(first, (*first[1:], num_train_steps), strict=True)):
            if a >= b:
                raise UserError(
                    f"grow: stage {i + 1} of {len(first)} has no training step: it would begin with step {a} of"
                    f" {num_train_steps} and end before step {b}. Train longer, or leave out a stage."
                )
        return first

    def kept_in(self, num_train_steps: int, longer: int) -> "StepGrowth":
        """The same stages at the same steps of a training that is made longer."""
        first = self.first_steps(num_train_steps)
        return StepGrowth({_fraction(step, longer): n for step, n in zip(first, self.values, strict=True)})

    def at(self, step: int, num_train_steps: int) -> int:
        """The number of steps of the solver in a training step, counted from 0."""
        return self.values[bisect.bisect_right(self.first_steps(num_train_steps), step) - 1]


def _first_step(fraction: float, num_train_steps: int) -> int:
    """0.6 * 10 is 6.000000000000001 or 5.999999999999999 for some numbers: rounded first."""
    return math.ceil(round(fraction * num_train_steps, 6))


def _fraction(step: int, num_train_steps: int) -> str:
    """The shortest fraction of training with which a stage begins at this step."""
    rounded = (round(step / num_train_steps, digits) for digits in range(1, 18))
    return repr(next(fraction for fraction in rounded if _first_step(fraction, num_train_steps) == step))


class _Stages(Mapping[str, int]):
    """A mapping that can be hashed, in the order in which it was written."""

    def __init__(self, pairs):
        self.pairs: tuple[tuple[float, int], ...] = tuple(pairs)

    def __getitem__(self, key: str) -> int:
        return dict(self._items)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._items))

    def __len__(self) -> int:
        return len(self.pairs)

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Stages) and self.pairs == other.pairs

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key}: {steps}" for key, steps in self._items) + "}"

    @property
    def _items(self) -> list[tuple[str, int]]:
        return [(repr(fraction), steps) for fraction, steps in self.pairs]
