"""What the experiment has found: its record, and from that alone tables and figures."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from experiments import style
from experiments.gradient_flow import norms as rule
from experiments.gradient_flow.norms import Verdict, clipped, counts, final, verdict
from experiments.gradient_flow.plan import SYSTEMS, GradientFlowConfig, System
from experiments.gradient_flow.readings import SHARE, BySolver, Effect, Refined
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.statistics import Interval, contrasts, interval, paired
from experiments.tables import Table, difference_cells

_LABELS = {
    ("baseline", "flow"): "layers in its place",
    ("shallow", "flow"): "later layers",
    ("shallow", "coda"): "last norm",
}
# Told apart in grey too.
LOOKS = {
    "baseline": {"color": style.STYLE.reference, "linestyle": style.line(1)},
    "hybrid": {"color": style.colour(0), "linestyle": style.line(0)},
    "shallow": {"color": style.colour(1), "linestyle": style.line(2)},
}
_SMOOTHED = 25  # a curve is averaged over 1 / _SMOOTHED of its steps


@dataclass(kw_only=True)
class GradientFlowProtocol(Protocol, GradientFlowConfig):
    """flow_steps, alpha: of the hybrid. optimizer: in words."""

    flow_steps: int
    alpha: float
    num_train_steps: int
    optimizer: str
    weight_decay_on: str


@dataclass(frozen=True)
class Trained(Training, System):
    """
    loss: of training, by step. norms: component -> norms of its gradient, by step. clip: the limit of the total norm.
    refined: of hybrid and baseline. readings, alpha, control (of the trained and of an untrained model), and
        control_gradient, the largest that the control's matrix had: of the hybrid.
    """

    loss: list[float] = field(default_factory=list)
    norms: dict[str, list[float]] = field(default_factory=dict)
    clip: float | None = None
    parameters: int = 0
    refined: Refined | None = None
    readings: list[BySolver] = field(default_factory=list)
    alpha: float | None = None
    control_gradient: float | None = None
    control: dict[str, Effect] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GradientFlow(Record):
    """unigram: what frequencies of single tokens reach on the part `report`, nats per token."""

    protocol: GradientFlowProtocol
    unigram: float
    results: list[Trained]

    def of(self, system: str) -> list[Trained]:
        """Its trainings, by seed."""
        return sorted((r for r in self.results if r.system == system), key=lambda r: r.seed)


def verdicts(record: GradientFlow, system: str) -> list[Verdict]:
    """The seed's rule for each seed."""
    found = []
    for own, baseline in zip(record.of(system), record.of("baseline"), strict=True):
        after = clipped(own.norms["flow"], own.norms["total"], own.clip) if system == "hybrid" else None
        found.append(verdict(own.loss, baseline.loss, after, record.protocol.final_steps))
    return found


def page(record: GradientFlow) -> Mapping[str, Any]:
    p, hybrid, baseline = record.protocol, record.of("hybrid"), record.of("baseline")
    pairs = zip(hybrid, baseline, strict=True)
    passes = {name: sum(r.refined.passes for r in record.of(name)) for name in ("hybrid", "baseline")}
    shares = {name: by_seed(record.of(name), lambda r: r.refined.refined[0].share) for name in passes}
    return {
        "p": p,
        "n": len(p.seeds),
        "rule": rule,
        "systems": "; ".join(f"{name}, {SYSTEMS[name]}" for name in p.systems),
        "losses": _losses(record),
        "ratio": interval([statistics.median(h.norms["flow"]) / statistics.median(b.norms["flow"]) for h, b in pairs]),
        "clipped": ", ".join(f"{name} {_mean(record.of(name), _clipped_share)}" for name in p.systems),
        "norms": _norms(record),
        "verdicts": _verdicts(record),
        "control_gradient": max(r.control_gradient for r in hybrid),
        "alpha": _mean(hybrid, lambda r: r.alpha),
        "controls": _controls(hybrid),
        "trained": _mean(hybrid, lambda r: r.report_loss),
        "solvers": _solvers(hybrid),
        "share": SHARE,
        "passes": ", ".join(f"{name} {k} of {len(p.seeds)} seeds" for name, k in passes.items()),
        "against": paired(shares["hybrid"], shares["baseline"]),
        "refined": _refined({"hybrid": hybrid, "baseline": baseline}),
    }


def _losses(record: GradientFlow) -> Table:
    p = record.protocol
    against = contrasts({name: by_seed(record.of(name)) for name in p.systems}, lambda name: "baseline")
    rows = []
    for name, loss in against.items():
        own = record.of(name)
        trained = _mean(own, lambda r: final(r.loss, p.final_steps))
        rows.append([name, f"{own[0].parameters:,}", trained, loss.mean, *difference_cells(loss)])
    head = ["model", "trained parameters", "training loss at the end", "reported loss", "minus baseline", "p (Holm)"]
    return Table([*head, "d_z"], rows)


def _norms(record: GradientFlow) -> Table:
    """Medians and largest are over the steps of each seed, then over seeds; counts over all steps of all seeds."""
    rows = []
    for system in record.protocol.systems:
        own = record.of(system)
        for name in own[0].norms:
            pairs = [(r.norms[name], r.norms["total"]) for r in own]
            share = [statistics.median(v / t if t else 0.0 for v, t in zip(*pair, strict=True)) for pair in pairs]
            values = ([statistics.median(v) for v, _ in pairs], [max(v) for v, _ in pairs], share)
            steps = sum(len(v) for v, _ in pairs)
            each = zip(*(astuple(counts(*pair)) for pair in pairs), strict=True)
            cells = [system, _LABELS.get((system, name), name), *map(_small, values)]
            rows.append([*cells, *(f"{sum(k)} of {steps}" for k in each)])
    head = ["model", "component", "median", "largest", "share of total", f"< {rule.VANISHING:g}"]
    return Table([*head, f"< {rule.RELATIVE:g} of total", f"> {rule.EXPLODING:g}", "not finite"], rows)


def _verdicts(record: GradientFlow) -> Table:
    rows = []
    for name in (name for name in record.protocol.systems if name != "baseline"):
        found = verdicts(record, name)
        gradients = [v.gradient for v in found if v.gradient is not None]
        gradient = interval(gradients) if gradients else "has no flow"
        passed = f"{sum(v.passes for v in found)} of {len(found)} seeds"
        rows.append([name, interval([v.ratio for v in found]), gradient, passed])
    return Table(["model", "loss ratio", "mean gradient of the flow", "passes"], rows)


def _controls(hybrid: list[Trained]) -> Table:
    rows = []
    for name in ("trained", "untrained"):
        values = zip(*(astuple(r.control[name]) for r in hybrid), strict=True)
        rows.append([f"{name}, never given a control", *map(_small, values)])
    return Table(["hybrid", "mean difference of logits", "relative", "change of the loss"], rows)


def _solvers(hybrid: list[Trained]) -> Table:
    rows = []
    for each in zip(*(r.readings for r in hybrid), strict=True):
        change = [e.loss - r.report_loss for e, r in zip(each, hybrid, strict=True)]
        values = (change, [e.divergence for e in each], [e.displacement for e in each])
        rows.append([each[0].solver, each[0].steps, each[0].evaluations, *map(_small, values)])
    head = ["solver", "steps", "evaluations", "loss minus as trained", "divergence of logits", "displacement"]
    return Table(head, rows)


def _refined(trained: Mapping[str, list[Trained]]) -> Table:
    rows = []
    for name, own in trained.items():
        moved = _small([r.refined.displacement for r in own])
        for k, each in enumerate(zip(*([r.refined.left_out, *r.refined.refined] for r in own), strict=True)):
            words = f"steps of 1/{each[0].factor}" if k else "left out"
            change = [e.loss - r.report_loss for e, r in zip(each, own, strict=True)]
            values = (change, [e.divergence for e in each], [e.share if k else 1.0 for e in each])
            rows.append([name, words, moved, *map(_small, values)])
    head = ["model", "its middle", "displacement", "loss minus as trained", "divergence of logits", "share"]
    return Table(head, rows)


def _clipped_share(r: Trained) -> float:
    """Of the steps."""
    return sum(total > r.clip for total in r.norms["total"]) / len(r.loss) if r.clip else 0.0


def _mean(own: Iterable[Trained], value: Callable[[Trained], float]) -> Interval:
    return interval([value(r) for r in own])


def _small(values: Sequence[float]) -> str:
    """Mean and interval with three significant digits: norms and divergences cover orders of magnitude."""
    own = interval(values)
    return f"{own.mean:.3g} ± {own.half:.2g}"


def draw(record: GradientFlow) -> Iterator[style.Named]:
    yield "gradient_flow", _gradient_flow(record)
    yield "invariance", _invariance(record)


def _gradient_flow(record: GradientFlow) -> Figure:
    """By step: training loss; total norm before clipping; norms of the flow and of the layers that it replaces."""
    p, clip = record.protocol, record.of("hybrid")[0].clip
    window = max(1, p.num_train_steps // _SMOOTHED)
    figure, (row,) = style.panels(1, 3, (10.5, 3.4), dpi=200)
    row[2].set_yscale("log")  # before its bands are drawn, which ask for it
    for system in p.systems:
        own = record.of(system)
        _band(row[0], [r.loss for r in own], window, system, system)
        _band(row[1], [r.norms["total"] for r in own], window, system, system)
    for system, words in (("baseline", "baseline, layers in its place"), ("hybrid", "hybrid, flow")):
        _band(row[2], [r.norms["flow"] for r in record.of(system)], window, system, words)
    _level(row[0], record.unigram, "single tokens")
    if clip:
        _level(row[1], clip, "clipped above")
    gradient = "gradient, before clipping"
    labels = (("training loss", "nats per token"), (gradient, "norm of the whole"), (gradient, "norm of the middle"))
    for panel, (title, words) in zip(row, labels, strict=True):
        style.finish(panel, legend=7.5, title=title, ylabel=words, xlabel=f"steps (mean of {window})")
    figure.supxlabel(f"mean and 95 % interval over n = {len(p.seeds)} seeds", fontsize=8)
    return figure


def _invariance(record: GradientFlow) -> Figure:
    """Left: divergence of logits against evaluations of the field, by solver. Right: share against refinement, of the
    flow and of the negative control."""
    figure, ((left, right),) = style.panels(1, 2, (8.5, 3.6), dpi=200)
    own, factors = record.of("hybrid"), record.protocol.refinements
    for k, solver in enumerate(dict.fromkeys(r.solver for r in own[0].readings)):
        each = [at for at in zip(*(r.readings for r in own), strict=True) if at[0].solver == solver]
        x, moved = [at[0].evaluations for at in each], [interval([r.divergence for r in at]) for at in each]
        style.points(left, x, moved, fmt=f"{style.mark(k)}-", label=solver, markersize=4)
    _level(left, _mean(own, lambda r: r.refined.left_out.divergence).mean, "flow left out")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(ScalarFormatter())
    for system, words in (("baseline", "baseline's layers"), ("hybrid", "flow")):
        each = zip(*(r.refined.refined for r in record.of(system)), strict=True)
        shares = [interval([r.share for r in at]) for at in each]
        style.points(right, factors, shares, label=words, marker="o", markersize=4, **LOOKS[system])
    right.set_xticks(factors)
    x, y = "m: steps of 1/m of the trained length", "share of what the middle does"
    style.finish(left, 7.5, xlabel="evaluations of the field", ylabel="divergence of logits", title="the trained flow")
    style.finish(right, 7.5, xlabel=x, ylabel=y, title="refined")
    for panel in (left, right):
        panel.set_ylim(bottom=0)
    return figure


def _band(panel: Axes, curves: list[list[float]], window: int, system: str, label: str) -> None:
    """Mean and interval over seeds of curves, each averaged over windows of steps."""
    smooth = [np.convolve(curve, np.ones(window) / window, "valid") for curve in curves]
    own = [interval(values) for values in zip(*smooth, strict=True)]
    style.curve(panel, np.arange(len(own)) + window, own, alpha=0.18, label=label, linewidth=1.4, **LOOKS[system])


def _level(panel: Axes, y: float, words: str) -> None:
    """A line across, with words at its right end."""
    panel.axhline(y, color=style.STYLE.muted, linewidth=0.8)
    where = panel.get_yaxis_transform()
    panel.text(0.99, y, words, transform=where, fontsize=7, color="dimgrey", ha="right", va="top")
