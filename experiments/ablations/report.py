"""What the ablations have found: their record, and from that alone tables and a figure for each group."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from experiments import style, tables
from experiments.ablations.plan import AblationsConfig, Model
from experiments.measure import Place, ReadTraining
from experiments.protocol import Protocol
from experiments.records import Record, by_seed
from experiments.statistics import Contrast, contrasts
from experiments.tables import Cell, Table


@dataclass(frozen=True)
class Trained(ReadTraining, Model):
    """A training of a model."""


@dataclass(frozen=True)
class About:
    """model: that is trained for an arm. settings: what the arm changes, in words."""

    model: str
    settings: str


@dataclass(frozen=True)
class Asked:
    """A group: begins: what its arms begin from, in words. places: of its readings."""

    question: str
    reference: str
    begins: str
    arms: dict[str, About]
    places: list[Place]


@dataclass(kw_only=True)
class AblationsProtocol(Protocol, AblationsConfig):
    """steps: of trainings, all numbers that there are. groups: those that were chosen."""

    steps: list[int]
    groups: dict[str, Asked]


@dataclass(frozen=True)
class Described:
    """parameters: what is trained. evaluations: of blocks in a training step. config: of the model, as YAML has it."""

    parameters: int
    evaluations: int | float
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ablations(Record):
    """models: label -> what it is. selection: trainings that chose learning rates."""

    protocol: AblationsProtocol
    models: dict[str, Described]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)

    def of(self, group: str) -> dict[str, list[Trained]]:
        """arm -> its trainings."""
        arms = self.protocol.groups[group].arms
        return {arm: [r for r in self.results if r.model == about.model] for arm, about in arms.items()}


def losses(record: Ablations, group: str) -> dict[str, Contrast]:
    """arm -> reported loss; the arms of the group are one family of tests."""
    own = {arm: by_seed(trained) for arm, trained in record.of(group).items()}
    return contrasts(own, lambda arm: record.protocol.groups[group].reference)


def readings(record: Ablations, group: str, key: str = "loss") -> dict[tuple[Place, str], Contrast]:
    """(place, arm) -> `loss` or `displacement` there, against the reference of the group read there too.

    All tests of the group are one family.
    """
    asked, trained = record.protocol.groups[group], record.of(group)
    own = {
        (place, arm): by_seed(trained[arm], lambda r, place=place: getattr(r.at(place), key))
        for place in asked.places
        for arm in asked.arms
    }
    return contrasts(own, lambda at: (at[0], asked.reference))


def page(record: Ablations) -> Mapping[str, Any]:
    p = record.protocol
    first = (p.read_batches or p.report_batches or 0) * p.tokens_per_step
    return {
        "p": p,
        "steps": " or ".join(map(str, p.steps)),
        "rates": p.about_rates("each arm"),
        "read": f"the first {first:,} tokens, if it has so many," if first else "all",
        "groups": "\n\n".join(_group(record, name) for name in p.groups),
    }


def files(record: Ablations) -> dict[str, Table]:
    """CSV of each arm of each group, as trained and at each place of reading; and of each training."""
    rows: list[dict[str, Cell]] = []
    for name, asked in record.protocol.groups.items():
        for arm, loss in losses(record, name).items():
            model, rate = record.models[asked.arms[arm].model], record.of(name)[arm][0].learning_rate
            what = {"parameters": model.parameters, "evaluations": model.evaluations, "learning_rate": rate}
            rows.append({"group": name, "arm": arm, "read": "as trained", **what, **tables.contrast_numbers(loss)})
        for ((solver, steps), arm), loss in readings(record, name).items():
            rows.append({"group": name, "arm": arm, "read": f"{solver} {steps}", **tables.contrast_numbers(loss)})
    return {"summary.csv": Table.of(rows), "runs.csv": Table.of(map(vars, record.results))}


def _group(record: Ablations, name: str) -> str:
    """The section of a group: its question, its arms, and its tables."""
    asked, found, trained = record.protocol.groups[name], losses(record, name), record.of(name)
    rows = []
    for arm, about in asked.arms.items():
        model, own = record.models[about.model], trained[arm]
        cells = [arm, tables.count(model.parameters), f"{model.evaluations:g}", f"{own[0].learning_rate:g}"]
        speed = tables.milliseconds(r.seconds_per_step for r in own)
        rows.append([*cells, *tables.contrast_cells(found[arm]), speed])
    head = ["arm", "trained", "evaluations", "rate", *tables.contrast_head(asked.reference), "ms per step"]
    blocks = [
        f"## {name} (n = {found[asked.reference].mean.n})",
        f"{asked.question} All begin with {asked.begins}.",
        tables.bullets(f"{arm}: {about.settings or 'nothing changed'}" for arm, about in asked.arms.items()),
        Table(head, rows),
    ]
    if asked.places:
        against, moved = readings(record, name), readings(record, name, "displacement")
        for words, cell in (
            ("Loss, read by solver and number of steps:", lambda at: against[at].mean),
            (
                f"Minus {asked.reference} read there too; p (Holm):",
                lambda at: "; ".join(filter(None, map(str, tables.difference_cells(against[at])[:2]))),
            ),
            ("Displacement of the flow, ||x(1) - x(0)|| / ||x(0)||:", lambda at: moved[at].mean),
        ):
            rows = [[arm, *(cell((place, arm)) for place in asked.places)] for arm in asked.arms]
            blocks += [words, Table(["arm", *(f"{solver} {steps}" for solver, steps in asked.places)], rows)]
    return "\n\n".join(map(str, blocks))


def draw(record: Ablations) -> Iterator[style.Named]:
    names, found = list(record.protocol.groups), [losses(record, name) for name in record.protocol.groups]
    counts = record.protocol.counts["report"]
    spans = [
        style.span([loss.mean for own in found for loss in own.values()], [counts["5"]]),
        style.span([loss.difference for own in found for loss in own.values() if loss.difference], [0.0]),
    ]
    for name in names:
        yield name, _figure(record, name, spans)


def _figure(record: Ablations, name: str, spans: list[style.Span]) -> Figure:
    """Left: losses of all arms, with a dot for each seed. Next: differences to the reference. Right: readings."""
    p, found, trained = record.protocol, losses(record, name), record.of(name)
    asked, n = p.groups[name], found[p.groups[name].reference].mean.n
    count = 3 if asked.places else 2
    wide = 1 + 0.16 * len(asked.places)
    figure, (row,) = style.panels(1, count, (9 + 4.5 * wide * (count - 2), 4.2), width_ratios=[1, 1, wide][:count])
    for k, (arm, loss) in enumerate(found.items()):
        look = {"color": style.series(k)["color"], "marker": style.series(k)["marker"]}
        style.seeds(row[0], k + 0.15, [r.report_loss for r in trained[arm]], look["color"])
        for panel, shown in ((row[0], loss.mean), (row[1], loss.difference)):
            if shown is not None:
                style.points(panel, [k], [shown], **look)
    style.loss_axis(row[0], "unseen text", p.unit, n, p.counts["report"], spans[0])
    row[1].axhline(0.0, color=style.REFERENCE, linewidth=0.8)
    row[1].set(ylabel=f"minus {asked.reference}, paired by seed", ylim=spans[1])
    row[1].grid(alpha=0.25)
    for panel in row[:2]:
        style.arms(panel, list(found))
    if asked.places:
        against, places = readings(record, name), [f"{solver} {steps}" for solver, steps in asked.places]
        cells = [[against[place, arm].mean for place in asked.places] for arm in asked.arms]
        style.heat(row[2], list(asked.arms), places, cells)
        row[2].set_title("loss, read by solver and number of steps without training", fontsize=9)
    figure.suptitle(f"{name}, n = {n} seeds, 95 % intervals", fontsize=10)
    return figure
