"""The results of the experiment: its record, and from that alone tables and figures."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from matplotlib.figure import Figure

from experiments import style
from experiments.gradient_flow import norms as rule
from experiments.gradient_flow.plan import SYSTEMS, GradientFlowConfig
from experiments.gradient_flow.readings import SHARE, Changed, Effect, Refined
from experiments.jobs import System
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, Interval, contrasts, interval
from experiments.tables import Table, difference_cells

_LABELS = {
    ("baseline", "flow"): "layers in its place",
    ("untied", "flow"): "layers in its place",
    ("quarters", "flow"): "layers in its place",
    ("shallow", "flow"): "later layers",
    ("shallow", "coda"): "last norm",
}
LOOKS = {
    "baseline": style.series(1) | {"color": style.REFERENCE},
    "hybrid": style.series(0),
    "shallow": style.series(2),
    "untied": style.series(3),
    "quarters": style.series(4),
}
# In the order of drawing.
MIDDLES = {"quarters": "quarters of layers", "untied": "untied layers", "baseline": "layers", "hybrid": "flow"}
_LOOKS_OF_MIDDLES = {words: LOOKS[name] for name, words in MIDDLES.items()}
_SMOOTHED = 25  # a curve is averaged over 1 / _SMOOTHED of its steps


@dataclass(kw_only=True)
class GradientFlowProtocol(Protocol, GradientFlowConfig):
    """flow_steps, alpha: of the hybrid. optimizer: in words."""

    flow_steps: int
    alpha: float
    num_train_steps: int
    optimizer: str
    weight_decay_on: str

    @property
    def middles(self) -> list[str]:
        """The systems whose middle is evaluated in other steps."""
        return [name for name in MIDDLES if name in self.systems]


@dataclass(frozen=True)
class Trained(Training, System):
    """
    Attributes:
        loss: of training, by step. norms: component -> norms of its gradient, by step. clip: the limit of the total
            norm.
        refined: for all but shallow. readings, alpha, control (of the trained and of an untrained model), and
            control_gradient, the largest gradient norm of the control's matrix: for the hybrid.
    """

    loss: list[float] = field(default_factory=list)
    norms: dict[str, list[float]] = field(default_factory=dict)
    clip: float | None = None
    parameters: int = 0
    refined: Refined | None = None
    readings: list[Changed] = field(default_factory=list)
    alpha: float | None = None
    control_gradient: float | None = None
    control: dict[str, Effect] = field(default_factory=dict)

    def norm(self, name: str) -> np.ndarray:
        """Of a component, by step, without steps in which it or the total norm is not finite."""
        norm, total = np.array(self.norms[name]), np.array(self.norms["total"])
        return norm[np.isfinite(norm) & np.isfinite(total)]

    def final_loss(self, last: int) -> float:
        """Of training, the mean over the last steps, of those with a finite loss."""
        return _of_finite(np.mean, self.loss[-last:])

    @property
    def clipped_gradient(self) -> float:
        """The mean norm of the flow's gradient after clipping, over finite steps."""
        norm, total = np.array(self.norms["flow"]), np.array(self.norms["total"])
        finite = np.isfinite(norm) & np.isfinite(total)
        return _of_finite(np.mean, rule.clipped(norm[finite], total[finite], self.clip))

    @property
    def clipped_share(self) -> float:
        """The share of clipped steps, of the finite ones."""
        return _of_finite(np.mean, self.norm("total") > self.clip) if self.clip else 0.0


@dataclass(frozen=True, kw_only=True)
class GradientFlow(Record):
    """unigram: loss of unigram frequencies on the part `report`, nats per token."""

    protocol: GradientFlowProtocol
    unigram: float
    results: list[Trained]


def page(record: GradientFlow) -> Mapping[str, object]:
    p, hybrid, baseline = record.protocol, record.of(system="hybrid"), record.of(system="baseline")
    own = {name: record.of(system=name) for name in p.systems}
    pairs = zip(hybrid, baseline, strict=True)
    middles = {name: own[name] for name in reversed(p.middles)}
    passes = {name: sum(r.refined.passes for r in trained) for name, trained in middles.items()}
    unmatched = "untied" not in p.systems or None
    medians = ([_of_finite(np.median, r.norm("flow")) for r in pair] for pair in pairs)
    return {
        "rule": rule,
        "systems": "; ".join(f"{name}, {SYSTEMS[name]}" for name in p.systems),
        "losses": _losses(p, own),
        "ratio": interval([own / other if other else math.nan for own, other in medians]),
        "clipped": ", ".join(f"{name} {_mean(rs, lambda r: r.clipped_share)}" for name, rs in own.items()),
        "norms": _norms(own),
        "verdicts": _verdicts(record),
        "control_gradient": max(r.control_gradient for r in hybrid),
        "alpha": _mean(hybrid, lambda r: r.alpha),
        "controls": _controls(hybrid),
        "trained": _mean(hybrid, lambda r: r.report_loss),
        "solvers": _solvers(hybrid),
        "share": SHARE,
        "passes": ", ".join(f"{name} {k} of {p.n} seeds" for name, k in passes.items()),
        "against": _against(record),
        "refined": _refined(middles),
        "matched": None if unmatched else _matched(record),
        "unmatched": unmatched,
        "quarters": p.horizon("quarters") * p.flow_steps if {"untied", "quarters"} <= set(p.systems) else None,
    }


def _losses(p: GradientFlowProtocol, own: Mapping[str, list[Trained]]) -> Table:
    found, rows = contrasts({name: by_seed(trained) for name, trained in own.items()}, lambda name: "baseline"), []
    for name, loss in found.items():
        trained = _mean(own[name], lambda r: r.final_loss(p.final_steps))
        rows.append([name, f"{own[name][0].parameters:,}", trained, loss.mean, *difference_cells(loss)])
    head = ["model", "trained parameters", "training loss at the end", "reported loss", "minus baseline", "p (Holm)"]
    return Table([*head, "d_z"], rows)


def _norms(trained: Mapping[str, list[Trained]]) -> Table:
    """Medians and maxima are over finite steps of each seed, then over seeds; counts over all steps of all seeds."""
    rows = []
    for system, own in trained.items():
        total = np.array([r.norms["total"] for r in own])  # [seed, step]
        for name in own[0].norms:
            norm = np.array([r.norms[name] for r in own])
            finite = np.isfinite(norm) & np.isfinite(total)
            share = np.divide(norm, total, out=np.where(finite, 0.0, np.nan), where=finite & (total != 0))
            known = np.where(finite, norm, np.nan)
            asked = (np.median, known), (np.max, known), (np.median, share)
            values = ([_of_finite(of, seed) for seed in each] for of, each in asked)
            met = (f"{rule_(norm, total).sum()} of {norm.size}" for rule_ in rule.RULES.values())
            rows.append([system, _LABELS.get((system, name), name), *map(_small, values), *met])
    return Table(["model", "component", "median", "largest", "share of total", *rule.RULES], rows)


def _verdicts(record: GradientFlow) -> Table:
    """The published criterion for each seed."""
    rows, last = [], record.protocol.final_steps
    for name in (name for name in record.protocol.systems if name != "baseline"):
        own, baseline = record.of(system=name), record.of(system="baseline")
        ratios = [r.final_loss(last) / b.final_loss(last) for r, b in zip(own, baseline, strict=True)]
        gradients = [r.clipped_gradient for r in own]
        has_middle = name != "shallow"
        passed = sum(map(rule.passes, ratios, gradients if has_middle else [None] * len(own)))
        gradient = interval(gradients) if has_middle else "has no flow"
        rows.append([name, interval(ratios), gradient, f"{passed} of {len(own)} seeds"])
    return Table(["model", "loss ratio", "mean gradient of the flow", "passes"], rows)


def _controls(hybrid: list[Trained]) -> Table:
    rows = []
    for name in ("trained", "untrained"):
        values = zip(*(astuple(r.control[name]) for r in hybrid), strict=True)
        rows.append([f"{name}, never given a control", *map(_small, values)])
    return Table(["hybrid", "mean difference of logits", "relative", "change of the loss"], rows)


def _changed(
    own: list[Trained], read: Callable[[Trained], list[Changed]], *keys: str
) -> Iterator[tuple[Changed, list[str]]]:
    """For each evaluation of the trainings: what it is, and cells: change of loss, and its `keys`."""
    for each in zip(*map(read, own), strict=True):
        change = [e.loss - r.report_loss for e, r in zip(each, own, strict=True)]
        yield each[0], [_small(change), *(_small([getattr(e, key) for e in each]) for key in keys)]


def _solvers(hybrid: list[Trained]) -> Table:
    found = _changed(hybrid, lambda r: r.readings, "divergence", "displacement")
    head = ["solver", "steps", "evaluations", "loss minus as trained", "divergence of logits", "displacement"]
    return Table(head, [[read.solver, read.steps, read.evaluations, *cells] for read, cells in found])


def _refined(trained: Mapping[str, list[Trained]]) -> Table:
    rows = []
    for name, own in trained.items():
        moved = _small([r.refined.displacement for r in own])
        evaluations = lambda r: [r.refined.left_out, *r.refined.coarse, *r.refined.refined]  # noqa: E731
        for read, cells in _changed(own, evaluations, "divergence", "share"):
            coarse = f"steps: {read.steps}" if read.steps else "left out"
            rows.append([name, f"steps of 1/{read.factor}" if read.factor else coarse, moved, *cells])
    head = ["model", "middle", "displacement", "loss minus as trained", "divergence of logits", "share"]
    return Table(head, rows)


def shares(record: GradientFlow) -> dict[tuple[int, str], Contrast]:
    """(factor, model) -> its share with steps of 1 / factor, hybrid against baseline; all are one family."""
    own = {
        (factor, name): by_seed(record.of(system=name), lambda r, k=k: r.refined.refined[k].share)
        for k, factor in enumerate(record.protocol.refinements)
        for name in ("baseline", "hybrid")
    }
    return contrasts(own, lambda at: (at[0], "baseline"))


def _against(record: GradientFlow) -> Table:
    found = {factor: contrast for (factor, name), contrast in shares(record).items() if name == "hybrid"}
    rows = [[f"steps of 1/{factor}", *difference_cells(contrast)] for factor, contrast in found.items()]
    return Table(["share", "hybrid minus baseline", "p (Holm)", "d_z"], rows)


def matched(record: GradientFlow) -> dict[tuple[int, str], Contrast]:
    """(n, model) -> its share with steps of 1/n, 0 as trained; hybrid against untied, all other n are one family."""
    p, found = record.protocol, {}
    for name in p.middles:
        steps = 1 if name == "baseline" else p.flow_steps
        for r in record.of(system=name):
            evaluations = (*r.refined.coarse, *r.refined.refined)
            read = ((e.steps // p.horizon(name) or e.factor * steps, e.share) for e in evaluations)
            for n, share in ((steps, 0.0), *read):
                found.setdefault((n, name), {})[r.seed] = share
    return contrasts(found, lambda at: (at[0], "untied") if at[1] == "hybrid" and at[0] != p.flow_steps else at)


def _matched(record: GradientFlow) -> Table:
    found, rows = matched(record), []
    names = [name for name in ("hybrid", "untied", "quarters", "baseline") if name in record.protocol.systems]
    for n in sorted({n for n, _ in found}):
        own = [found.get((n, name)) for name in names]
        means = (contrast and contrast.mean for contrast in own)
        rows.append(["1" if n == 1 else f"1/{n}", *means, *difference_cells(next(filter(None, own)))])
    return Table(["h", *(MIDDLES[name] for name in names), "flow minus untied layers", "p (Holm)", "d_z"], rows)


def _mean(own: Iterable[Trained], value: Callable[[Trained], float]) -> Interval:
    return interval([value(r) for r in own])


def _small(values: Sequence[float]) -> str:
    """Mean and interval with three significant digits: norms and divergences span orders of magnitude."""
    own = interval(values)
    return f"{own.mean:.3g} ± {own.half:.2g}"


def draw(record: GradientFlow) -> Iterator[style.Named]:
    yield "gradient_flow", _gradient_flow(record)
    yield "invariance", _invariance(record)


def _gradient_flow(record: GradientFlow) -> Figure:
    """By step: loss; total norm before clipping; norms of the flow and of the layers in its place."""
    p, clip = record.protocol, record.of(system="hybrid")[0].clip
    figure, (row,) = style.panels(1, 3, (13, 4.2))
    loss, total, middle = row
    losses = {name: style.mean_curve([r.curve for r in record.of(system=name)]) for name in p.systems}
    limits = style.span([at for _, own in losses.values() for at in own], p.counts["select"].values())
    style.losses(loss, p, "select", limits)
    loss.set(title="loss while training")
    style.curves(loss, losses, LOOKS)
    middle.set_yscale("log")  # before drawing its bands, which depend on the scale
    window = max(1, p.num_train_steps // _SMOOTHED)
    ends = {panel: {} for panel in (total, middle)}
    for panel, key, names in ((total, "total", p.systems), (middle, "flow", p.middles)):
        for name in names:
            x, own = _band([r.norms[key] for r in record.of(system=name)], window)
            style.curve(panel, x, own, **LOOKS[name] | {"marker": ""})
            ends[panel][name] = (x[-1], own[-1].mean)
    if clip:
        style.level(total, clip, "clipped above")
    style.level(middle, rule.GRADIENT, f"published rule:\nmean > {rule.GRADIENT:g}\n(after clipping)")
    style.direct(total, ends[total], LOOKS)
    style.direct(middle, {MIDDLES[name]: end for name, end in ends[middle].items()}, _LOOKS_OF_MIDDLES)
    for panel, words in ((total, "whole"), (middle, "middle")):
        panel.set(title="gradient, before clipping", ylabel=f"norm of the {words}, n = {p.n}")
    for panel in row:
        panel.set_xlabel("steps" if panel is loss else f"steps (mean of {window})")
    figure.supxlabel(f"means; {style.about_bars(p.n)}", fontsize=8)
    return figure


def _invariance(record: GradientFlow) -> Figure:
    """Left: divergence of logits by solver and steps. Right: share against refinement, for the flow and the negative
    controls, with the criterion."""
    figure, ((left, right),) = style.panels(1, 2, (11, 4.2))
    own, p = record.of(system="hybrid"), record.protocol
    found = {
        (at[0].solver, at[0].steps): interval([1000 * r.divergence for r in at])
        for at in zip(*(r.readings for r in own), strict=True)
    }
    solvers, steps = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    style.heat(left, solvers, [f"{k} steps" for k in steps], [[found[s, k] for k in steps] for s in solvers])
    out = 1000 * _mean(own, lambda r: r.refined.left_out.divergence).mean
    left.set_title(f"divergence of logits x 1000, n = {p.n}; {out:.1f} with the flow left out", fontsize=10)
    ends = {}
    for name in p.middles:
        each = zip(*(r.refined.refined for r in record.of(system=name)), strict=True)
        at = [interval([r.share for r in one]) for one in each]
        style.points(right, p.refinements, at, markersize=4, **LOOKS[name])
        ends[MIDDLES[name]] = (p.refinements[-1], at[-1].mean)
    style.level(right, SHARE, f"our rule: passes below {SHARE:g}", "dimgrey")
    right.set_xticks(p.refinements)
    words = f"share of the effect of the middle, n = {p.n}"
    right.set(xlabel="m: steps of 1/m of the trained length", ylabel=words, ylim=(0, None))
    style.direct(right, ends, _LOOKS_OF_MIDDLES)
    return figure


def _band(curves: list[list[float]], window: int) -> tuple[Sequence[float], list[Interval]]:
    """Mean and interval over seeds of curves averaged over the finite steps of windows."""
    own = [interval(values) for values in zip(*(_smoothed(np.array(curve), window) for curve in curves), strict=True)]
    return np.arange(len(own)) + window, own


def _smoothed(curve: np.ndarray, window: int) -> np.ndarray:
    """Means over the finite steps of each window; nan where it has none."""
    finite = np.isfinite(curve)
    counts = np.convolve(finite, np.ones(window), "valid")
    missed = np.divide(window, counts, out=np.full_like(counts, np.nan), where=counts > 0)  # exactly 1 without gaps
    return np.convolve(np.where(finite, curve, 0.0), np.ones(window) / window, "valid") * missed


def _of_finite(statistic: Callable[[np.ndarray], np.floating], values: Sequence[float] | np.ndarray) -> float:
    """A statistic of the finite values; nan if there are none."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(statistic(finite)) if finite.size else math.nan
