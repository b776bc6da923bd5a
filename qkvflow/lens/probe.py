"""Probes: record and edit named values while a forward pass is traced.

A flow is one scan over its steps, so a place is traced once for all of them. Recorded values leave the scan with an
axis of steps; an edit of some steps is in a branch that the others do not take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from haliax import NamedArray

from qkvflow.axes import LAYERS, STEPS
from qkvflow.errors import UserError
from qkvflow.lens.cache import Cache
from qkvflow.lens.names import state_name

Edit = Callable[[NamedArray], NamedArray]
Edits = Sequence[tuple[frozenset[str], Edit]]


@dataclass
class Notes:
    """The records of a forward pass, in all its parts.

    Attributes:
        asked: names to record; None for all.
        edits: names, and the functions that change the values there; in order.
        arrays, rows: those of the `Cache`; each row with its position in the pass, by part, step and place.
        parts: of the pass seen so far.
    """

    asked: frozenset[str] | None
    edits: Edits
    arrays: dict[str, NamedArray] = field(default_factory=dict)
    rows: list[tuple[tuple[int, int, int], str, str, int | None]] = field(default_factory=list)
    parts: int = 0

    def wants(self, name: str) -> bool:
        return self.asked is None or name in self.asked

    def cache(self) -> Cache:
        """All records, in the order of the forward pass."""
        rows = tuple(row for _, *row in sorted(self.rows, key=lambda row: row[0]))
        return Cache(self.arrays, tuple((name, key, row) for name, key, row in rows))


class Probe:
    """For the places outside steps: `embed`, `state.0`, `norm`, `logits`."""

    def __init__(self, notes: Notes, part: str = ""):
        self._notes, self._part = notes, part

    def see(self, place: str, value: NamedArray) -> NamedArray:
        """See `qkvflow.blocks.Probe`."""
        name = self._part + place
        for names, edit in self._notes.edits:
            if name in names:
                value = _edited(edit, value, name)
        if self._notes.wants(name):
            self._notes.arrays[name] = value
            self._notes.rows.append(((self._notes.parts, 0, 0), name, name, None))
        self._notes.parts += 1
        return value

    def beside(self, place, make, use, plain):
        raise AssertionError(f"{place} stands inside of steps")

    def within(self, part: str) -> "Probe":
        """See `qkvflow.blocks.Probe`."""
        return Probe(self._notes, f"{part}.")

    def steps(self, count: int, evaluations: int) -> "StepProbe":
        """See `qkvflow.blocks.Probe`."""
        probe = StepProbe(self._notes, self._part, count, evaluations // count)
        self._notes.parts += 1
        return probe


class StepProbe:
    """For the places inside the steps of one flow; the `qkvflow.depth.plan.Watch` of its solve."""

    def __init__(self, notes: Notes, part: str, count: int, stages: int):
        self._notes, self._part, self._count, self._stages = notes, part, count, stages
        self._place_in_order = notes.parts
        self._step: jax.Array | None = None
        self._stage = -1
        self._seen: dict[str, NamedArray] = {}
        self._order: list[tuple[str, list[str]]] = []

    def begin(self, step: jax.Array) -> None:
        """See `qkvflow.depth.plan.Watch`; a scan may trace its body more than once."""
        self._step, self._stage, self._seen, self._order = step, -1, {}, []

    def see(self, place: str, value: NamedArray) -> NamedArray:
        """See `qkvflow.blocks.Probe`. `in` is the first place of each evaluation of the block."""
        self._stage += place == "in"
        place = self._staged(place)
        return self._noted(place, self._names(place), value)

    def beside(
        self,
        place: str,
        make: Callable[[], NamedArray],
        use: Callable[[NamedArray], NamedArray],
        plain: NamedArray,
    ) -> NamedArray:
        """See `qkvflow.blocks.Probe`."""
        place = self._staged(place)
        names = self._names(place)
        touched = [k for k, name in enumerate(names) if any(name in some for some, _ in self._notes.edits)]
        if not touched and not any(map(self._notes.wants, names)):
            return plain
        value = self._noted(place, names, make())
        return self._where(touched, lambda _: use(value), plain)

    def end(self, x: NamedArray) -> tuple[NamedArray, dict[str, NamedArray]]:
        """See `qkvflow.depth.plan.Watch`."""
        names = [self._part + state_name(k + 1, self._count) for k in range(self._count)]
        x = self._noted("state", names, x)
        seen, self._seen, self._step = self._seen, {}, None
        return x, seen

    def keep(self, seen: Mapping[str, NamedArray]) -> None:
        """See `qkvflow.depth.plan.Watch`."""
        for place, (key, names) in enumerate(self._order):
            asked = [k for k, name in enumerate(names) if self._notes.wants(name)]
            stack = seen[key].rename({STEPS: LAYERS})
            self._notes.arrays[key] = stack if len(asked) == self._count else stack[LAYERS, jnp.asarray(asked)]
            at = self._place_in_order
            self._notes.rows += [((at, k, place), names[k], key, row) for row, k in enumerate(asked)]

    def within(self, part: str) -> "Probe":
        raise AssertionError(f"{part}: a flow has no parts")

    def steps(self, count: int, evaluations: int):
        raise AssertionError("a flow has no flows")

    def _staged(self, place: str) -> str:
        return place if self._stages == 1 else f"{self._stage}.{place}"

    def _names(self, place: str) -> list[str]:
        return [f"{self._part}{k}.{place}" for k in range(self._count)]

    def _noted(self, key: str, names: list[str], value: NamedArray) -> NamedArray:
        """The value with its edits; recorded if requested at any step."""
        for edited, edit in self._notes.edits:
            rows = [k for k, name in enumerate(names) if name in edited]
            value = self._where(rows, lambda v, f=edit, rows=rows: _edited(f, v, names[rows[0]]), value)
        if any(map(self._notes.wants, names)):
            self._seen[self._part + key] = value
            self._order.append((self._part + key, names))
        return value

    def _where(self, rows: list[int], change: Callable[[NamedArray], NamedArray], value: NamedArray) -> NamedArray:
        """`change(value)` in these steps. Other steps do not compute it and stay unchanged, bit for bit."""
        if not rows:
            return value
        if len(rows) == self._count:
            return change(value)
        here = jnp.zeros(self._count, bool).at[jnp.asarray(rows)].set(True)[self._step]
        return jax.lax.cond(here, change, lambda value: value, value)


def _edited(edit: Edit, value: NamedArray, name: str) -> NamedArray:
    """The result of an edit, in the form of its input.

    Raises:
        UserError: it is not a named array, or has other axes.
    """
    given = edit(value)
    if not isinstance(given, NamedArray) or set(given.axes) != set(value.axes):
        got = given.axes if isinstance(given, NamedArray) else type(given).__name__
        want = ", ".join(f"{a.name} {a.size}" for a in value.axes)
        raise UserError(
            f"the edit of {name} must return a NamedArray with the axes of its input ({want}), but returned {got}."
        )
    return given.rearrange(value.axes).astype(value.dtype)
