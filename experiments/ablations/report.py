"""The results of the ablations: their record, and from that alone tables and a figure for each group."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from experiments import style
from experiments.ablations.plan import AblationsConfig, Model, value_of
from experiments.jobs import Place
from experiments.lines import Line, against, known, lines, table
from experiments.measure import ReadTraining
from experiments.protocol import Protocol
from experiments.records import Record, by_seed
from experiments.search import about_edges, tried
from experiments.statistics import Contrast, contrasts
from experiments.study import filled
from experiments.tables import Cell, Table, bullets, contrast_numbers, difference_cells


@dataclass(frozen=True)
class Trained(ReadTraining, Model):
    """A training of a model."""


@dataclass(frozen=True)
class About:
    """model: the trained model of an arm. settings: the arm's changes, in words."""

    model: str
    settings: str


@dataclass(frozen=True)
class Asked:
    """A group. begins: what its arms start from, in words. places: of its evaluations. by: as in `Group`."""

    question: str
    reference: str
    begins: str
    arms: dict[str, About]
    places: list[Place]
    by: str | None = None


@dataclass(kw_only=True)
class AblationsProtocol(Protocol, AblationsConfig):
    """steps: of training, all distinct numbers. groups: the selected ones."""

    steps: list[int]
    groups: dict[str, Asked]


@dataclass(frozen=True)
class Described:
    """parameters: trained ones. evaluations: of blocks in a training step. config: of the model, as in YAML."""

    parameters: int
    evaluations: int | float
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ablations(Record):
    """models: label -> its description. selection: trainings for the selection of learning rates."""

    protocol: AblationsProtocol
    models: dict[str, Described]
    results: list[Trained]
    selection: list[Trained] = field(default_factory=list)

    def group(self, name: str) -> dict[str, Line]:
        """arm -> its line; the arms of the group are one family of tests."""
        asked = self.protocol.groups[name]
        trained = {arm: self.of(model=about.model) for arm, about in asked.arms.items()}
        return lines(trained, asked.reference, {arm: self.models[about.model] for arm, about in asked.arms.items()})


def readings(record: Ablations, group: str, key: str = "loss") -> dict[tuple[Place, str], Contrast]:
    """(place, arm) -> `loss` or `displacement` there, compared with the group's reference at the same place.

    All tests of the group are one family.
    """
    asked, found = record.protocol.groups[group], record.group(group)
    own = {
        (place, arm): by_seed(line.trained, lambda r, place=place: getattr(r.at(place), key))
        for place in asked.places
        for arm, line in found.items()
    }
    return contrasts(own, lambda at: (at[0], asked.reference))


def by_rate(record: Ablations, name: str) -> dict[str, dict[float, str]]:
    """value of the group's `by` -> learning rate -> arm, both in order; empty without `by`."""
    asked, found = record.protocol.groups[name], {}
    if asked.by is None:
        return {}
    for arm, line in record.group(name).items():
        value = value_of(asked.by, record.models[asked.arms[arm].model].config)
        found.setdefault(value, {})[line.what.learning_rate] = arm
    *_, key = asked.by.split(".")
    return {f"{key} {value}": dict(sorted(found[value].items())) for value in sorted(found)}


def page(record: Ablations) -> Mapping[str, object]:
    p = record.protocol
    first = p.tokens_of(p.read_batches or p.report_batches)
    return {
        "steps": " or ".join(map(str, p.steps)),
        "rates": p.about_rates("each arm"),
        "edges": _edges(record),
        "read": f"the {first}," if first else "all",
        "groups": "\n\n".join(_group(record, name) for name in p.groups),
    }


def files(record: Ablations) -> dict[str, Table]:
    """CSV of each arm of each group, as trained and at each place of evaluation; and of each training."""
    rows: list[dict[str, Cell]] = []
    for name in record.protocol.groups:
        for arm, line in record.group(name).items():
            what = {"parameters": line.cost.parameters, "evaluations": line.cost.evaluations}
            what |= {"learning_rate": line.what.learning_rate, **contrast_numbers(line.loss)}
            rows.append({"group": name, "arm": arm, "read": "as trained", **what})
        for ((solver, steps), arm), loss in readings(record, name).items():
            rows.append({"group": name, "arm": arm, "read": f"{solver} {steps}", **contrast_numbers(loss)})
    return {"summary.csv": Table.of(rows), "runs.csv": Table.of(map(vars, record.results))}


def _edges(record: Ablations) -> str:
    """The arms whose best rate is at an edge of a grid that could grow, in words."""
    if not record.selection or not record.protocol.beyond_grid:
        return ""
    arms: dict[str, str] = {}
    for name, asked in record.protocol.groups.items():
        for arm, about in asked.arms.items():
            arms.setdefault(about.model, f"{name}.{arm}")  # others are the same model
    return f" {about_edges({arm: tried(r for r in record.selection if r.model == of) for of, arm in arms.items()})}"


def _group(record: Ablations, name: str) -> str:
    """The section of a group: its question, its arms and its tables."""
    asked, found, places = record.protocol.groups[name], record.group(name), record.protocol.groups[name].places
    read, moved = readings(record, name), readings(record, name, "displacement")

    def by_place(cell: Callable[[tuple[Place, str]], Cell]) -> Table | None:
        rows = [[arm, *(cell((place, arm)) for place in places)] for arm in asked.arms]
        return Table(["arm", *(f"{solver} {steps}" for solver, steps in places)], rows) if places else None

    grid = by_rate(record, name)
    rates = sorted({rate for arms in grid.values() for rate in arms})

    def by_rates(cell: Callable[[str], Cell]) -> Table:
        rows = [[value, *(cell(arms[r]) if r in arms else "" for r in rates)] for value, arms in grid.items()]
        return Table(["model", *(f"rate {rate:g}" for rate in rates)], rows)

    columns = known("trained", "evaluations", "rate"), against(asked.reference), known("ms per step")
    values = {
        "name": name,
        "asked": asked,
        "n": found[asked.reference].loss.mean.n,
        "arms": bullets(f"{arm}: {about.settings or 'nothing changed'}" for arm, about in asked.arms.items()),
        "losses": table("arm", found, *columns),
    }
    if grid:
        place = places[0] if places else None
        of = {arm: moved[place, arm].mean for arm in asked.arms} if place else {}
        shown = by_rates(lambda arm: f"{of[arm].mean:.3g} ± {of[arm].half:.2g}") if place else None
        values |= {"by_rate": by_rates(lambda arm: found[arm].loss.mean), "read": None, "minus": None, "moved": shown}
    else:
        tests = by_place(lambda at: "; ".join(filter(None, map(str, difference_cells(read[at])[:2]))))
        values |= {"by_rate": None, "read": by_place(lambda at: read[at].mean), "minus": tests}
        values |= {"moved": by_place(lambda at: moved[at].mean)}
    return filled("ablations/group.md", values).rstrip()


def draw(record: Ablations) -> Iterator[style.Named]:
    groups = {name: record.group(name) for name in record.protocol.groups}
    found = [line.loss for own in groups.values() for line in own.values()]
    spans = (
        style.span([loss.mean for loss in found], counts=[record.protocol.counts["report"]]),
        style.span([loss.difference for loss in found if loss.difference], [0.0]),
    )
    gridded = [name for name, asked in record.protocol.groups.items() if asked.by]
    mapped = [value.mean.mean for name in groups if name not in gridded for value in readings(record, name).values()]
    shades = style.extent(mapped)
    moved = [value.mean.mean for name in gridded for value in readings(record, name, "displacement").values()]
    ends = style.extent(value for value in moved if value > 0)
    for name, own in groups.items():
        if name in gridded:
            yield name, _by_rate(record, name, own, spans[0], (ends[0] / 2, 2 * ends[1]) if ends else None)
        else:
            yield name, _figure(record, name, own, spans, shades)


def _by_rate(
    record: Ablations, name: str, found: Mapping[str, Line], losses: style.Span, moved: style.Span | None
) -> Figure:
    """Losses, and displacements at the group's first place, against the learning rate."""
    grid, places = by_rate(record, name), record.protocol.groups[name].places[:1]
    looks, displacement = style.series_of(grid), readings(record, name, "displacement")
    figure, (row,) = style.panels(1, 1 + len(places), (5.5 * (1 + len(places)), 4.2))
    for panel in row:
        panel.set(xlabel="learning rate", xscale="log")
    style.losses(row[0], record.protocol, "report", losses)
    style.curves(row[0], {v: (list(a), [found[arm].loss.mean for arm in a.values()]) for v, a in grid.items()}, looks)
    for place in places:
        row[1].set(ylabel="displacement of the flow, ||x(1) - x(0)|| / ||x(0)||", yscale="log", ylim=moved)
        own = {v: (list(a), [displacement[place, arm].mean for arm in a.values()]) for v, a in grid.items()}
        style.curves(row[1], own, looks)
        row[1].set_xlim(row[0].get_xlim())
    figure.suptitle(f"{name}, {style.about_bars(record.protocol.n)}", fontsize=10)
    return figure


def _figure(
    record: Ablations, name: str, found: Mapping[str, Line], spans: Sequence[style.Span], shades: style.Span | None
) -> Figure:
    """Left: losses of all arms, one dot per seed. Middle: differences to the reference. Right: other evaluations."""
    asked = record.protocol.groups[name]
    count = 3 if asked.places else 2
    wide = 1 + 0.16 * len(asked.places)
    figure, (row,) = style.panels(1, count, (9 + 4.5 * wide * (count - 2), 4.2), width_ratios=[1, 1, wide][:count])
    for k, line in enumerate(found.values()):
        look = style.series(k) | {"linestyle": ""}
        style.seeds(row[0], k + 0.15, [r.report_loss for r in line.trained], look["color"])
        for panel, shown in ((row[0], line.loss.mean), (row[1], line.loss.difference)):
            if shown is not None:
                style.points(panel, [k], [shown], **look)
    style.losses(row[0], record.protocol, "report", spans[0])
    style.zero(row[1])
    unit = record.protocol.unit
    row[1].set_ylabel(f"minus {asked.reference}, by seed (nats per {unit}), n = {record.protocol.n}", fontsize=9)
    row[1].set_ylim(spans[1])
    for panel in row[:2]:
        style.arms(panel, list(found))
    if asked.places:
        read, places = readings(record, name), [f"{solver} {steps}" for solver, steps in asked.places]
        cells = [[read[place, arm].mean for place in asked.places] for arm in asked.arms]
        style.heat(row[2], list(asked.arms), places, cells, shades)
        words = f"loss on the beginning of held-out text (nats per {unit})"
        row[2].set_title(f"{words}\nby solver and number of steps, without training", fontsize=9)
    figure.suptitle(f"{name}, {style.about_bars(record.protocol.n)}", fontsize=10)
    return figure
