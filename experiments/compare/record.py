"""What a comparison leaves: its trainings, what is missing, and the systems of each row side by side."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from experiments.compare.plan import ROWS, WIDTHS, CompareConfig, Variant
from experiments.compare.steps import StepTimes
from experiments.cost import Cost
from experiments.lines import Line, lines
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.search import Tried, tried


@dataclass(kw_only=True)
class CompareProtocol(Protocol, CompareConfig):
    """steps: of the reference."""

    steps: int


@dataclass(frozen=True)
class Trained(Training, Variant):
    """A training of a variant. machine: where it was reported from, which is taken for the one that made its steps;
    empty if unknown."""

    machine: str = ""


Rows = Mapping[str, Mapping[str, Line]]  # row -> system -> its line
Losses = Mapping[str, Mapping[int, float]]  # system -> seed -> reported loss


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """
    Attributes:
        costs: label of a variant -> its costs, with memory if it is in a row.
        selection: trainings for the selection of learning rates. checks: of rates around the transferred ones.
        replaced: trainings like `results`, with transferred rates that the checks corrected.
        progress: stage -> system -> (trainings that are done, all).
        clock: times of a step, measured side by side. None: times are those of the trainings.
    """

    protocol: CompareProtocol
    costs: dict[str, Cost]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)
    checks: list[Trained] = field(default_factory=list)
    replaced: list[Trained] = field(default_factory=list)
    progress: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    clock: StepTimes | None = None

    def row(self, row: str) -> dict[str, list[Trained]]:
        """The trainings of a row, of systems that have some."""
        own = {name: [r for r in self.results if r.system == name and row in r.rows] for name in self.protocol.names}
        return {name: found for name, found in own.items() if found}

    def losses(self) -> Losses:
        """Those of trainings with equal steps."""
        return {name: by_seed(found) for name, found in self.row("iso_step").items()}

    @property
    def timed_on(self) -> str:
        """The machine whose times are compared: that of most trainings of the reference with equal steps or, without
        any, of most of its trainings, or of all; with a `clock`, its own."""
        if self.clock is not None:
            return self.clock.machine
        name = self.protocol.reference
        own = self.row("iso_step").get(name) or [r for r in self.results if r.system == name] or self.results
        return Counter(r.machine for r in own).most_common(1)[0][0] if own else ""

    def seconds(self, trained: Iterable[Training]) -> list[float]:
        """Times of a step on the machine whose times are compared, of trainings of one model: those of the `clock`, one
        per round, or those of the trainings themselves. Empty if there are none."""
        own = [r for r in trained if isinstance(r, Trained)]
        if self.clock is not None:
            return self.clock.of(own[0].system, own[0].width) if own else []
        return [r.seconds_per_step for r in own if r.machine == self.timed_on]

    def cost(self, of: Trained) -> Cost:
        return self.costs[f"{of.system}-d{of.width}-s{of.steps}"]

    def by_width(self) -> dict[str, dict[int, dict[int, float]]]:
        """system -> width -> seed -> reported loss."""
        found: dict[str, dict[int, dict[int, float]]] = {}
        for name, trained in self.row(WIDTHS).items():
            for r in trained:
                found.setdefault(name, {}).setdefault(r.width, {})[r.seed] = r.report_loss
        return found

    def tried(self) -> dict[str, Tried]:
        """system -> the rates of its search."""
        found = {name: tried(r for r in self.selection if r.system == name) for name in self.protocol.names}
        return {name: rates for name, rates in found.items() if rates}


def by_row(record: Comparison) -> Rows:
    """The systems of a row are one family of tests. A row is left out while none of the trainings is there that it has
    of its own: it would be a part of another one."""
    stages, rows = record.progress, [row for row in ROWS if row in record.protocol.rows]
    unmade = [row for row in rows if (own := stages.get(ROWS[row])) and not any(done for done, _ in own.values())]
    found = {row: record.row(row) for row in rows if row not in unmade}
    costs = {row: {name: record.cost(rs[0]) for name, rs in own.items()} for row, own in found.items()}
    steps = {row: {name: rs[0].steps for name, rs in own.items()} for row, own in found.items()}
    reference = record.protocol.reference
    tests = len(record.protocol.names) - 1  # those that are missing included
    return {row: lines(own, reference, costs[row], steps[row], tests) for row, own in found.items() if own}


def each(rows: Rows) -> list[tuple[str, Line]]:
    return [(row, line) for row, found in rows.items() for line in found.values()]


def extent(numbers: Iterable[int]) -> str:
    """A number that all have, or the smallest and the largest; empty without any."""
    own = sorted(numbers)
    return " to ".join(map(str, dict.fromkeys([*own[:1], *own[-1:]])))


def seeds_of(rows: Rows) -> str:
    """The number of seeds of all lines, or the smallest and the largest."""
    return extent(line.loss.mean.n for _, line in each(rows))


def machines(record: Comparison) -> str:
    """The machines that the trainings were reported from, in words; empty if it is the one of the record alone, or
    they are unknown."""
    own = sorted({r.machine for r in record.results if r.machine})
    if len(own) == 1 and own[0] != str(record.machine):
        return f"another machine ({own[0]})"
    return f"more than one machine ({'; '.join(own)})" if len(own) > 1 else ""


def missing(progress: Mapping[str, Mapping[str, tuple[int, int]]]) -> str:
    """What is missing, in words; empty if nothing is."""
    stages = {stage: own for stage, own in progress.items() if any(done < all_ for done, all_ in own.values())}
    if not stages:
        return ""
    done, planned = (sum(pair[k] for own in progress.values() for pair in own.values()) for k in (0, 1))
    rest = "; ".join(
        f"{stage}: {', '.join(f'{name} ({d} of {n})' for name, (d, n) in own.items() if d < n)}"
        for stage, own in stages.items()
    )
    return f"**Not finished.** {done} of {planned} trainings are done; missing: {rest}."
