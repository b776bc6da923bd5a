"""The results of the study: its record, and from that alone tables and figures."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import style
from experiments.dynamics.plan import SYSTEMS, DynamicsConfig
from experiments.dynamics.readings import FAMILIES, PROPERTIES, SCORES, Mark, Spectra
from experiments.jobs import System
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, contrasts, interval
from experiments.tables import Table, difference_cells

LOOKS = {"flow": style.series(0), "layers": style.series(1)}


@dataclass(kw_only=True)
class DynamicsProtocol(Protocol, DynamicsConfig):
    """flow_steps: L. parameters: of each system. optimizer: in words."""

    flow_steps: int
    num_train_steps: int
    parameters: dict[str, int]
    optimizer: str


@dataclass(frozen=True)
class Trained(Training, System):
    """spectra: at the checkpoints, untrained, and with the official times. marks: which tokens the scores mark."""

    spectra: list[Spectra] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def spectrum(self, family: str, step: int, reading: str = "ours") -> Spectra:
        return next(s for s in self.spectra if (s.family, s.step, s.reading) == (family, step, reading))

    def mark(self, score: str, sample: str, property: str) -> float:
        return next(m.correlation for m in self.marks if (m.score, m.sample, m.property) == (score, sample, property))

    @property
    def last(self) -> int:
        """Steps of the last checkpoint."""
        return max(s.step for s in self.spectra)


@dataclass(frozen=True, kw_only=True)
class Dynamics(Record):
    protocol: DynamicsProtocol
    results: list[Trained]


def page(record: Dynamics) -> Mapping[str, object]:
    p = record.protocol
    return {
        "systems": "; ".join(f"{name}: {words}, {p.parameters[name]:,} parameters" for name, words in SYSTEMS.items()),
        "losses": _losses(record),
        "growth": _spectral(record, lambda s: s.growth, "growth of the mean modulus (octaves)"),
        "positive": _spectral(record, lambda s: s.late_positive, "share with Re > 0, later half of t"),
        "official": _official(record),
        "properties": "; ".join(f"{name}: {words}" for name, words in PROPERTIES.items()),
        "marks": _marks(record),
    }


def _losses(record: Dynamics) -> Table:
    found = contrasts({name: by_seed(record.of(system=name)) for name in SYSTEMS}, lambda name: "layers")
    rows = [[name, contrast.mean, *difference_cells(contrast)] for name, contrast in found.items()]
    return Table(["system", "reported loss", "minus layers", "p (Holm)", "d_z"], rows)


def spectral_contrasts(record: Dynamics, value: Callable[[Spectra], float]) -> dict[tuple, Contrast]:
    """(system, family, trained or untrained) -> its value; the tests of trained minus untrained are one family.

    They are of independent samples: the untrained models have other initial weights.
    """

    def of(r: Trained, family: str, when: str) -> float:
        return value(r.spectrum(family, r.last if when == "trained" else 0))

    keys = itertools.product(SYSTEMS, FAMILIES, ("untrained", "trained"))
    values = {(s, *at): by_seed(record.of(system=s), lambda r, at=at: of(r, *at)) for s, *at in keys}
    return contrasts(values, lambda key: (*key[:2], "untrained"), independent=lambda key: True)


def _spectral(record: Dynamics, value: Callable[[Spectra], float], title: str) -> Table:
    found, rows = spectral_contrasts(record, value), []
    for system, family in itertools.product(SYSTEMS, FAMILIES):
        trained, fresh = (found[system, family, when] for when in ("trained", "untrained"))
        rows.append([system, family.upper(), trained.mean, fresh.mean, *difference_cells(trained)])
    return Table(["system", "matrix", title, "untrained", "trained minus untrained", "p (Holm)", "d"], rows)


def _official(record: Dynamics) -> Table:
    """For the flow: growth of |lambda| at the training times, and at the official times."""
    keys = [*itertools.product(("ours", "official"), ("growth", "real_growth"))]
    keys += [("ours", "late_positive"), ("official", "late_positive")]
    rows = []
    for family in FAMILIES:
        own = {key: [r.spectrum(family, r.last, key[0]) for r in record.of(system="flow")] for key in keys}
        rows.append([family.upper(), *(interval([getattr(s, key[1]) for s in at]) for key, at in own.items())])
    head = ["matrix", "growth of abs(lambda), ours", "of abs(Re), ours", "of abs(lambda), official times"]
    return Table([*head, "of abs(Re), official", "Re > 0 late, ours", "Re > 0 late, official times"], rows)


def mark_contrasts(record: Dynamics) -> dict[tuple, Contrast]:
    """(system, score, property, sample) -> correlation; the tests of shuffled minus text and of
    untrained minus text are one family.

    Text and shuffled text are read by the same models; the untrained ones are independent of them.
    """
    keys = itertools.product(SYSTEMS, SCORES, PROPERTIES, ("text", "shuffled", "untrained"))
    values = {
        key: by_seed(record.of(system=key[0]), lambda r, key=key: r.mark(key[1], key[3], key[2]))
        for key in keys
        if key[:2] != ("layers", "official")
    }
    return contrasts(values, lambda key: (*key[:3], "text"), independent=lambda key: key[3] == "untrained")


def _marks(record: Dynamics) -> Table:
    found, rows = mark_contrasts(record), []
    for system, score, name in dict.fromkeys(key[:3] for key in found):
        shuffled, untrained = (found[system, score, name, sample] for sample in ("shuffled", "untrained"))
        cells = [found[system, score, name, "text"].mean, shuffled.mean, untrained.mean]
        rows.append([system, score, name, *cells, *difference_cells(shuffled)[:2], *difference_cells(untrained)[:2]])
    head = ["system", "score", "property", "text", "shuffled", "untrained", "shuffled minus text", "p (Holm)"]
    return Table([*head, "untrained minus text", "p (Holm) "], rows)


def files(record: Dynamics) -> Mapping[str, Table]:
    """All spectra and correlations, with all digits."""
    spectra = [
        {"system": r.system, "seed": r.seed, "step": s.step, "matrix": s.family, "reading": s.reading, "t": t}
        | {"size": s.size[k], "real": s.real[k], "positive": s.positive[k]}
        for r in record.results
        for s in r.spectra
        for k, t in enumerate(s.times)
    ]
    marks = [{"system": r.system, "seed": r.seed} | vars(m) for r in record.results for m in r.marks]
    return {"spectra.csv": Table.of(spectra), "marks.csv": Table.of(marks)}


def draw(record: Dynamics) -> Iterator[style.Named]:
    yield "spectra", _spectra(record)
    yield "over_training", _over_training(record)


def _spectra(record: Dynamics) -> Figure:
    """Along t: mean |lambda| and the share with positive real part, trained, and untrained in grey."""
    figure, panels = style.panels(2, 2, (10, 7), sharex=True, sharey="row")
    shown = itertools.product({"size": "mean |lambda|", "positive": "share with Re > 0"}.items(), FAMILIES)
    ends: dict[Axes, dict[str, tuple[float, float]]] = {panel: {} for panel in panels.flat}
    for panel, ((name, words), family) in zip(panels.flat, shown, strict=True):
        panel.set(title=f"{family.upper()}: {words}", ylabel=f"{words}, n = {record.protocol.n}", xlabel="t")
        if name == "positive":
            style.level(panel, 0.5, "half")
        for system, look in LOOKS.items():
            own = record.of(system=system)
            for step, colour in ((0, style.MUTED), (own[0].last, look["color"])):
                at = [r.spectrum(family, step) for r in own]
                means = [interval(values) for values in zip(*(getattr(s, name) for s in at), strict=True)]
                style.curve(panel, at[0].times, means, **look | {"color": colour})
            ends[panel][system] = (at[0].times[-1], means[-1].mean)
    for panel, own in ends.items():  # when the common axes are final
        style.direct(panel, own, LOOKS)
    words = f"grey: new models with other initial weights; {style.about_bars(record.protocol.n)}"
    figure.supxlabel(words, fontsize=8)
    return figure


def _over_training(record: Dynamics) -> Figure:
    """Growth along t against training steps."""
    figure, (row,) = style.panels(1, 2, (10, 4), sharey=True)
    found: dict[Axes, style.Curves] = {}
    for panel, family in zip(row, FAMILIES, strict=True):
        curves = {}
        for system in SYSTEMS:
            own = record.of(system=system)
            steps = sorted({s.step for s in own[0].spectra if s.reading == "ours"})
            curves[system] = (steps, [interval([r.spectrum(family, k).growth for r in own]) for k in steps])
            style.curve(panel, *curves[system], **LOOKS[system])
        growth = f"growth of |lambda| (octaves), n = {record.protocol.n}"
        panel.set(title=family.upper(), xlabel="training steps", ylabel=growth)
        style.zero(panel)
        found[panel] = curves
    for panel, curves in found.items():  # when the common axis is final
        style.names(panel, curves, LOOKS)
    figure.supxlabel("at 0: a new model with other initial weights", fontsize=8)
    return figure
