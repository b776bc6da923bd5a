"""The results of the study of lifted models: its record, and from that alone the table and the figure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from experiments import style
from experiments.lift.plan import KINDS, LiftStudyConfig, Model
from experiments.protocol import Protocol
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, contrasts, interval
from experiments.tables import Cell, Table, bullets, count, difference_cells


@dataclass(frozen=True)
class Trained(Training, Model):
    """before: reported loss of the model from which training started."""

    before: float | None = None


@dataclass(kw_only=True)
class LiftProtocol(Protocol, LiftStudyConfig):
    """steps: of training. healing: steps of a fine-tune."""

    steps: int
    healing: int


@dataclass(frozen=True, kw_only=True)
class Lifted(Record):
    """parameters: label -> number of trained parameters."""

    protocol: LiftProtocol
    parameters: dict[str, int]
    results: list[Trained]

    def losses(self, which: str) -> dict[tuple[str, int], Contrast]:
        """(kind, K) -> `before` or `report_loss`, against dropped layers with the same K; one family of tests."""
        keys = [(kind, k) for k in self.protocol.dims for kind in KINDS]
        own = {key: by_seed(self.of(kind=key[0], k=key[1]), lambda r: getattr(r, which)) for key in keys}
        return contrasts(own, lambda key: ("dropped", key[1]))

    @property
    def base(self):
        """The interval of the trained model's loss."""
        return interval([r.report_loss for r in self.of(kind="trained")])


def page(record: Lifted) -> Mapping[str, object]:
    before, after = record.losses("before"), record.losses("report_loss")
    rows: list[list[Cell]] = []
    for kind, k in after:
        size = count(record.parameters[f"{kind.replace(' ', '_')}_{k}"])
        rows.append([k, kind, size, before[kind, k].mean, after[kind, k].mean, *difference_cells(after[kind, k])[:2]])
    head = ["K", "kind", "parameters", "before healing", "after", "minus dropped", "p (Holm)"]
    return {
        "kinds": bullets(f"{kind}: {words}" for kind, words in KINDS.items()),
        "base": f"{record.base} nats per {record.protocol.unit}, {count(record.parameters['trained'])} parameters",
        "table": Table(head, rows),
    }


def files(record: Lifted) -> dict[str, Table]:
    return {"runs.csv": Table.of(map(vars, record.results))}


def draw(record: Lifted) -> Iterator[style.Named]:
    """Losses against K, before and after healing, on a common scale."""
    p = record.protocol
    found = {"before healing": record.losses("before"), "after healing": record.losses("report_loss")}
    # Limits from the seeds, not the intervals: those of two seeds are wider than any visible effect.
    values = [loss for r in record.results for loss in (r.before, r.report_loss) if loss is not None]
    limits = style.span([], values, [p.counts["report"]])
    figure, (row,) = style.panels(1, 2, (10.0, 4.2))
    looks = style.series_of(KINDS)
    for panel, (words, own) in zip(row, found.items(), strict=True):
        panel.set(title=words, xlabel=f"K, of {p.layers} layers", xticks=p.dims)
        style.losses(panel, p, "report", limits)
        style.level(panel, record.base.mean, "original model", style.REFERENCE)
        style.curves(panel, {kind: (p.dims, [own[kind, k].mean for k in p.dims]) for kind in KINDS}, looks)
    yield "figure", figure
