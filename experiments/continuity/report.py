"""What the study has found: its record, and from that alone tables and figures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from experiments import style, tables
from experiments.continuity.plan import ContinuityConfig, Named
from experiments.cost import Cost
from experiments.measure import Place, ReadTraining
from experiments.protocol import Protocol
from experiments.records import Record, by_seed
from experiments.statistics import Contrast, Interval, contrasts, interval
from experiments.tables import Table

UPWARDS, AROUND = 0.02, 0.05  # nats that the loss of a flow may change by, from L on and from L / 2 on


@dataclass(kw_only=True)
class ContinuityProtocol(Protocol, ContinuityConfig):
    """steps: of trainings. read_at: places of the readings."""

    steps: int
    read_at: list[Place]

    @property
    def own(self) -> Place:
        """That of training."""
        return "euler", self.layers


@dataclass(frozen=True)
class Trained(ReadTraining, Named):
    """A training of an arm."""


@dataclass(frozen=True, kw_only=True)
class Continuity(Record):
    """costs: arm -> its costs, with memory. selection: trainings that chose learning rates, in a smaller width."""

    protocol: ContinuityProtocol
    costs: dict[str, Cost]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)

    def of(self, arm: str) -> list[Trained]:
        return [r for r in self.results if r.arm == arm]

    @property
    def flows(self) -> list[str]:
        """The arms that are read at other depths."""
        return [arm for arm in self.costs if self.of(arm)[0].readings]

    def change(self, arm: str, place: Place) -> Interval:
        """Loss read there minus that read at the place of training, paired by seed."""
        own = self.protocol.own
        return interval([r.at(place).loss - r.at(own).loss for r in self.of(arm)])


def losses(record: Continuity) -> dict[str, Contrast]:
    """arm -> reported loss; all arms are one family of tests."""
    own = {arm: by_seed(record.of(arm)) for arm in record.costs}
    return contrasts(own, lambda arm: record.protocol.reference)


def share_of_flops(record: Continuity, arm: str) -> tuple[int, float]:
    """By how many trainings of an arm the reference's mean loss on the part `select` is reached, and after which share
    of the reference's FLOPs, a mean over those."""
    p, reference = record.protocol, record.costs[record.protocol.reference]
    target = interval([r.select_loss for r in record.of(p.reference)]).mean
    first = [next((step for step, loss in r.curve if loss <= target), None) for r in record.of(arm)]
    there = [record.costs[arm].spent(step, p.steps) for step in first if step is not None]
    whole = reference.spent(p.steps, p.steps)
    return len(there), sum(there) / len(there) / whole if there else math.nan


def at_edge(record: Continuity) -> list[str]:
    """Arms whose chosen rate of the search is the lowest or highest that was tried: their best may lie beyond."""
    found = []
    for arm in record.costs:
        tried: dict[float, list[float]] = {}
        for r in record.selection:
            if r.arm == arm:
                tried.setdefault(r.learning_rate, []).append(r.select_loss)
        if tried and min(tried, key=lambda rate: sum(tried[rate])) in (min(tried), max(tried)):
            found.append(arm)
    return found


def page(record: Continuity) -> Mapping[str, Any]:
    p, n = record.protocol, len(record.protocol.seeds)
    edges = at_edge(record)
    return {
        "p": p,
        "n": n,
        "edges": f"Still at an edge: {', '.join(edges)}." if edges else "No chosen rate is at an edge.",
        "missing": ", ".join(sorted(set(p.arms) - set(record.costs))) or "none",
        "losses": _losses(record),
        "upwards": UPWARDS,
        "around": AROUND,
        "verdicts": _verdicts(record),
        "readings": _readings(record),
    }


def _losses(record: Continuity) -> Table:
    n, rows = len(record.protocol.seeds), []
    for arm, loss in losses(record).items():
        own, cost = record.of(arm), record.costs[arm]
        reached, share = share_of_flops(record, arm)
        few = "" if reached == n else f" ({reached} of {n} seeds)"
        size = [tables.count(cost.parameters), f"{own[0].learning_rate:g}", f"{cost.flops * record.protocol.steps:.3g}"]
        work = [f"{share:.2f}{few}" if reached else "not reached", tables.milliseconds(r.seconds_per_step for r in own)]
        memory = f"{(cost.memory or 0) / 2**20:.0f}"
        rows.append([arm, *size, *tables.contrast_cells(loss), *work, memory])
    reference = record.protocol.reference
    head = ["arm", "trained", "rate", "FLOPs", *tables.contrast_head(reference), f"FLOPs to the loss of {reference}"]
    return Table([*head, "ms per step", "peak MiB"], rows)


def worst(record: Continuity, arm: str, least: float, solvers: Sequence[str]) -> Interval:
    """The change that is largest in size, of all readings with at least so many steps."""
    places = [place for place in record.protocol.read_at if place[0] in solvers and place[1] >= least]
    return max((record.change(arm, place) for place in places), key=lambda change: abs(change.mean))


def _verdicts(record: Continuity) -> Table:
    p, rows = record.protocol, []
    for arm in record.flows:
        upwards, around = (worst(record, arm, p.layers, ("euler", "rk4")), worst(record, arm, p.layers / 2, ("euler",)))
        holds = abs(upwards.mean) <= UPWARDS and abs(around.mean) <= AROUND
        own = interval([r.at(p.own).loss for r in record.of(arm)])
        rows.append([arm, own, record.change(arm, ("rk4", p.layers)), upwards, around, "yes" if holds else "no"])
    head = ["arm", f"loss at L = {p.layers}", "RK4 minus that", "largest change from L on"]
    return Table([*head, "largest from L / 2 on", "an ODE by the rule"], rows)


def _readings(record: Continuity) -> Table:
    p = record.protocol
    rows = [[arm, *(f"{_mean(record, arm, place).mean:.3f}" for place in p.read_at)] for arm in record.flows]
    return Table(["arm", *(f"{solver} {steps}" for solver, steps in p.read_at)], rows)


def _mean(record: Continuity, arm: str, place: Place) -> Interval:
    return interval([r.at(place).loss for r in record.of(arm)])


def files(record: Continuity) -> dict[str, Table]:
    """CSV of each arm, as trained and at each place; and of each training."""
    rows = []
    for arm, loss in losses(record).items():
        cost = record.costs[arm]
        what = {"arm": arm, "parameters": cost.parameters, "flops": cost.flops, "memory": cost.memory}
        rows.append({**what, "read": "as trained", **tables.contrast_numbers(loss)})
        if arm in record.flows:
            for place in record.protocol.read_at:
                own = Contrast(_mean(record, arm, place))
                rows.append({**what, "read": "{} {}".format(*place), **tables.contrast_numbers(own)})
    return {"summary.csv": Table.of(rows), "runs.csv": Table.of(map(vars, record.results))}


def draw(record: Continuity) -> Iterator[style.Named]:
    shown = {title: [arm for arm in own if arm in record.costs] for title, own in record.protocol.panels.items()}
    shown = {title: own for title, own in shown.items() if own} or {"all arms": list(record.costs)}
    yield "flops", _flops(record, shown)
    yield "depths", _depths(record, shown)


def _flops(record: Continuity, shown: Mapping[str, list[str]]) -> Figure:
    """Loss on the part `select` against FLOPs spent."""
    p, n = record.protocol, len(record.protocol.seeds)
    curves = {arm: style.mean_curve([r.curve for r in record.of(arm)]) for own in shown.values() for arm in own}
    counts = [loss for size, loss in p.counts["select"].items() if size != "1"]
    limits = style.span([at for _, own in curves.values() for at in own], counts)
    figure, (panels,) = style.panels(1, len(shown), (6.5 * len(shown), 4.8), sharex=True)
    for panel, (title, names) in zip(panels, shown.items(), strict=True):
        ends, looks = {}, {arm: style.series(k) for k, arm in enumerate(names)}
        for arm in names:
            steps, own = curves[arm]
            spent = [record.costs[arm].spent(step, p.steps) for step in steps]
            style.curve(panel, spent, own, **looks[arm])
            ends[arm] = (spent[-1], own[-1].mean)
        panel.set(title=title, xlabel="FLOPs of training")
        style.loss_axis(panel, "the text to select by", p.unit, n, p.counts["select"], limits)
        style.direct(panel, ends, {arm: look["color"] for arm, look in looks.items()})
    return figure


def _depths(record: Continuity, shown: Mapping[str, list[str]]) -> Figure:
    """Loss against the number of Euler steps, without training; hollow marks: RK4 with L steps."""
    p, n = record.protocol, len(record.protocol.seeds)
    places = [place for place in p.read_at if place[0] == "euler"]
    found = {arm: [_mean(record, arm, place) for place in places] for arm in record.flows}
    other = {arm: _mean(record, arm, ("rk4", p.layers)) for arm in record.flows}
    counts = [loss for size, loss in p.counts["report"].items() if size != "1"]
    limits = style.span([at for own in found.values() for at in own] + list(other.values()), counts)
    figure, (panels,) = style.panels(1, len(shown), (6.5 * len(shown), 4.8), sharex=True)
    for panel, (title, names) in zip(panels, shown.items(), strict=True):
        looks = {arm: style.series(k) for k, arm in enumerate(names) if arm in found}
        panel.set_xscale("log", base=2)
        for arm, look in looks.items():
            style.curve(panel, [steps for _, steps in places], found[arm], **look)
            style.points(panel, [1.04 * p.layers], [other[arm]], **look | {"fillstyle": "none", "linestyle": ""})
        panel.axvline(p.layers, color=style.MUTED, linewidth=0.8)
        panel.set_xticks([n for _, n in places if n % p.layers == 0 or p.layers % n == 0])
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set(title=title, xlabel=f"Euler steps, without training (trained to be read with {p.layers})")
        style.loss_axis(panel, "unseen text", p.unit, n, p.counts["report"], limits)
        ends = {arm: (places[-1][1], found[arm][-1].mean) for arm in looks}
        style.direct(panel, ends, {arm: look["color"] for arm, look in looks.items()})
    return figure
