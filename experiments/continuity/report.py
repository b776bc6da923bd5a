"""The results of the study: its record, and from that alone tables and figures."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

from experiments import style
from experiments.continuity.plan import ContinuityConfig, Named
from experiments.cost import Cost
from experiments.counts import BEGINNING
from experiments.jobs import Place
from experiments.lines import Line, against, known, lines, table
from experiments.measure import ReadTraining
from experiments.protocol import Protocol
from experiments.records import Record
from experiments.search import about_edges, tried
from experiments.statistics import Contrast, Interval, interval
from experiments.tables import Table, contrast_numbers

COLUMNS = 12  # of a page's table, at most; a page with more depths shows those that divide L or are multiples of it
UPWARDS, AROUND = 0.02, 0.05  # nats by which the loss of a flow may change, from L upwards and from L / 2 upwards


@dataclass(kw_only=True)
class ContinuityProtocol(Protocol, ContinuityConfig):
    """steps: of trainings. read_at: numbers of steps of the evaluations."""

    steps: int
    read_at: list[int]

    @property
    def family(self) -> int:
        """Number of tests of the plan."""
        return len(self.arms) - 1

    @property
    def round_depths(self) -> list[int]:
        """The numbers of steps that divide L or are multiples of it."""
        return [n for n in self.read_at if n % self.layers == 0 or self.layers % n == 0]

    @property
    def shown_at(self) -> list[int]:
        """The numbers of steps in the page's table."""
        return self.read_at if len(self.read_at) <= COLUMNS else self.round_depths

    @property
    def rk4(self) -> Place:
        """The evaluation by another method, with L steps."""
        return "rk4", self.layers


@dataclass(frozen=True)
class Trained(ReadTraining, Named):
    """A training of an arm."""


@dataclass(frozen=True, kw_only=True)
class Continuity(Record):
    """costs: arm -> its costs, with memory. selection: trainings that chose learning rates, at a smaller width."""

    protocol: ContinuityProtocol
    costs: dict[str, Cost]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)

    @property
    def lines(self) -> dict[str, Line]:
        """arm -> its line; all arms of the plan, missing ones included, are one family of tests."""
        p, trained = self.protocol, {arm: self.of(arm=arm) for arm in self.costs}
        return lines(trained, p.reference, self.costs, dict.fromkeys(self.costs, p.steps), p.family)

    @property
    def flows(self) -> list[str]:
        """The arms that are evaluated at other depths."""
        return [arm for arm in self.costs if self.of(arm=arm)[0].readings]

    def at(self, arm: str, steps: int) -> Place:
        """So many steps of the arm's own solver."""
        return self.of(arm=arm)[0].solver, steps

    def places(self, arm: str, least: float = 0, most: float = math.inf) -> list[Place]:
        """Where the arm is evaluated with its own solver, with at least and at most so many steps."""
        return [self.at(arm, steps) for steps in self.protocol.read_at if least <= steps <= most]

    def loss(self, arm: str, place: Place) -> Interval:
        """The loss at that place."""
        return interval([r.at(place).loss for r in self.of(arm=arm)])

    def change(self, arm: str, place: Place) -> Interval:
        """Loss at that place minus loss at the place of training, paired by seed."""
        own = self.at(arm, self.protocol.layers)
        return interval([r.at(place).loss - r.at(own).loss for r in self.of(arm=arm)])


def share_of_flops(record: Continuity, arm: str) -> tuple[int, float]:
    """The number of an arm's trainings that reach the reference's mean loss on the part `select`, and the mean share of
    the reference's FLOPs that they need."""
    steps, found, costs = record.protocol.steps, record.lines, record.costs
    target = interval([r.select_loss for r in found[record.protocol.reference].trained]).mean
    there = [costs[arm].spent(step, steps) for step, _ in found[arm].reaches(target)]
    whole = costs[record.protocol.reference].spent(steps, steps)
    return len(there), sum(there) / len(there) / whole if there else math.nan


def page(record: Continuity) -> Mapping[str, object]:
    p, found = record.protocol, {arm: tried(r for r in record.selection if r.arm == arm) for arm in record.costs}

    def to_reference(arm: str) -> str:
        reached, share = share_of_flops(record, arm)
        few = "" if reached == p.n else f" ({reached} of {p.n} seeds)"
        return f"{share:.2f}{few}" if reached else "not reached"

    work = {f"FLOPs to the loss of {p.reference}": lambda line: to_reference(line.what.arm)}
    search = p.about_search if record.selection and p.search_width else p.about_rates("each arm")
    edges = f" {about_edges(found)}" if record.selection else ""
    columns = known("trained", "rate", "FLOPs"), against(p.reference), work, known("ms per step", "peak MiB")
    places = {arm: [*(record.at(arm, steps) for steps in p.shown_at), p.rk4] for arm in record.flows}
    rows = [[arm, own[0][0], *(f"{record.loss(arm, place).mean:.3f}" for place in own)] for arm, own in places.items()]
    return {
        "rates": f"{search}.{edges}",
        "missing": ", ".join(sorted(set(p.arms) - set(record.costs))) or "none",
        "losses": table("arm", record.lines, *columns),
        "stacks": any("stack" in p.arms[arm] for arm in record.costs) or None,
        "upwards": UPWARDS,
        "around": AROUND,
        "verdicts": _verdicts(record) if rows else None,
        "readings": Table(["arm", "solver", *map(str, p.shown_at), f"RK4 {p.layers}"], rows) if rows else None,
        "more": len(p.shown_at) < len(p.read_at) or None,
    }


def worst(record: Continuity, arm: str, places: Sequence[Place]) -> Interval:
    """The change of largest magnitude among these places; one that is not finite is the largest."""

    def size(change: Interval) -> float:
        return abs(change.mean) if math.isfinite(change.mean) else math.inf

    return max((record.change(arm, place) for place in places), key=size)


def _verdicts(record: Continuity) -> Table:
    p, rows = record.protocol, []
    for arm in record.flows:
        upwards = worst(record, arm, [*record.places(arm, p.layers, 4 * p.layers), p.rk4])
        around = worst(record, arm, record.places(arm, p.layers / 2, 4 * p.layers))
        holds = abs(upwards.mean) <= UPWARDS and abs(around.mean) <= AROUND
        own = record.loss(arm, record.at(arm, p.layers))
        rows.append([arm, own, record.change(arm, p.rk4), upwards, around, "yes" if holds else "no"])
    head = ["arm", f"loss at L = {p.layers}", "RK4 minus that", "largest change from L on, with RK4"]
    return Table([*head, "from L / 2 on, without RK4", "ODE by the rule"], rows)


def files(record: Continuity) -> dict[str, Table]:
    """CSV of each arm, as trained and at each place; and of each training."""
    rows = []
    for arm, line in record.lines.items():
        cost = record.costs[arm]
        what = {"arm": arm, "parameters": cost.parameters, "flops": cost.flops, "memory": cost.memory}
        rows.append({**what, "read": "as trained", **contrast_numbers(line.loss)})
        if arm in record.flows:
            for place in [*record.places(arm), record.protocol.rk4]:
                own = Contrast(record.loss(arm, place))
                rows.append({**what, "read": "{} {}".format(*place), **contrast_numbers(own)})
    return {"summary.csv": Table.of(rows), "runs.csv": Table.of(map(vars, record.results))}


def draw(record: Continuity) -> Iterator[style.Named]:
    """Loss against FLOPs and against depth."""
    shown = _panels(record)
    looks = looks_of(shown)
    yield "flops", _flops(record, shown, looks)
    if flows := {title: own for title, own in shown.items() if set(own) & set(record.flows)}:
        yield "depths", _depths(record, flows, looks)


def _panels(record: Continuity) -> dict[str, list[str]]:
    """title -> arms, of the planned panels of which at least two arms are there that are not all in another panel; one
    panel with all arms if there is none."""
    there = {title: [arm for arm in own if arm in record.costs] for title, own in record.protocol.panels.items()}
    of = {frozenset(own): title for title, own in there.items() if len(own) > 1}  # the last of panels with equal arms
    largest = [title for own, title in of.items() if not any(own < other for other in of)]
    return {title: there[title] for title in largest} or {"all arms": list(record.costs)}


def looks_of(shown: Mapping[str, list[str]]) -> style.Looks:
    """A style for each arm, the same in all panels, and unlike those of the arms beside it in any of them: the least
    used of these styles."""
    taken: dict[str, int] = {}
    for arm in (arm for own in shown.values() for arm in own):
        if arm not in taken:
            used = list(taken.values())
            beside = {taken[other] for own in shown.values() if arm in own for other in own if other in taken}
            free = [k for k in range(len(style.COLOURS)) if k not in beside]
            more = (k for k in itertools.count(len(style.COLOURS)) if k not in beside)  # of colours that others have
            taken[arm] = min(free, key=used.count) if free else next(more)
    return {arm: style.series(k) for arm, k in taken.items()}


def _flops(record: Continuity, shown: Mapping[str, list[str]], looks: style.Looks) -> Figure:
    """Loss on the part `select` against training FLOPs."""
    p, found = record.protocol, {}
    for arm in (arm for own in shown.values() for arm in own):
        steps, own = style.mean_curve([r.curve for r in record.of(arm=arm)])
        found[arm] = [record.costs[arm].spent(step, p.steps) for step in steps], own
    limits = style.span([at for _, own in found.values() for at in own], counts=[p.counts["select"]])
    figure, panels = style.tiles(len(shown), 6.5, 4.8, sharex=True)
    for panel, (title, names) in zip(panels, shown.items(), strict=True):
        panel.set(title=title, xlabel="FLOPs of training")
        style.losses(panel, p, "select", limits)
        style.curves(panel, {arm: found[arm] for arm in names}, looks)
    return figure


def _depths(record: Continuity, shown: Mapping[str, list[str]], looks: style.Looks) -> Figure:
    """Loss against the number of steps of each arm's solver, without retraining; hollow marks: RK4 with L steps.

    The axis cuts off intervals that go beyond the means of all by more than a quarter of their range.
    """
    p, steps = record.protocol, record.protocol.read_at
    found = {arm: (steps, [record.loss(arm, place) for place in record.places(arm)]) for arm in record.flows}
    other = {arm: record.loss(arm, p.rk4) for arm in record.flows}
    each = [(n, at) for _, own in found.values() for n, at in zip(steps, own, strict=True)]
    each += [(p.layers, at) for at in other.values()]
    means = [at.mean for _, at in each if np.isfinite(at.mean)]
    low, high = style.extent(means) or (0.0, 1.0)
    room = (high - low) / 4
    bounds = [at.mean + side * style.half(at) for n, at in each if n >= p.layers / 2 for side in (-1, 1)]
    ends = np.clip(bounds, low - room, high + room)
    limits = style.span([], [*means, *ends[~np.isnan(ends)]], [p.counts.get(BEGINNING, {})])
    figure, panels = style.tiles(len(shown), 6.5, 4.8, sharex=True)
    for panel, (title, names) in zip(panels, shown.items(), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(p.round_depths)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set(title=title, xlabel=f"steps, without training (trained with up to {p.layers})")
        style.losses(panel, p, BEGINNING, limits)
        own = {arm: found[arm] for arm in names if arm in found}
        for arm, (_, losses) in own.items():
            style.curve(panel, steps, losses, **looks[arm])
            hollow = looks[arm] | {"fillstyle": "none", "linestyle": ""}
            style.points(panel, [1.04 * p.layers], [other[arm]], **hollow)
        panel.axvline(p.layers, color=style.MUTED, linewidth=0.8)
        style.names(panel, own, looks)
    bars = style.about_bars(p.n)
    words = f"hollow marks: RK4 with {p.layers} steps; {bars}, cut where they go far beyond all means"
    figure.supxlabel(words, fontsize=8)
    return figure
