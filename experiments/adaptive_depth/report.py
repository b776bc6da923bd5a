"""What the experiment has found: its record, and from that alone the table and the figure."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from experiments import style
from experiments.adaptive_depth.plan import Stage
from experiments.counts import Counts
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, contrasts, interval
from experiments.tables import Cell, Table, count, difference_cells, number

NAMES = {"flow": "flow", "gpt2": "GPT-2"}
KINDS = {"full": "all weights", "lora": "LoRA and embeddings"}
Trainings = list["Trained"]
Key = tuple[str | None, str, str, int | None]  # source, target, kind, depth


@dataclass(frozen=True)
class Settings:
    """layers: of GPT-2, and steps of the flow. pretrain, tune: numbers of training steps. seeds: or how many."""

    layers: int
    pretrain: int
    tune: int
    seeds: int | list[int]


@dataclass(frozen=True)
class Trained(Training, Stage):
    """before: loss on the text that is watched, before tuning."""

    parameters: int = 0
    trained_parameters: int = 0
    before: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptiveDepth(Record):
    """texts: name -> bytes of each part.
    counts: text -> part -> what n-grams reach there that are counted in as much of the text as a model is tuned on.
    """

    settings: Settings
    texts: dict[str, dict[str, int]]
    results: list[Trained]
    counts: dict[str, dict[str, Counts]]

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The pairs (source, target) in their order."""
        return list(dict.fromkeys((r.source, r.target) for r in self.results if r.source is not None))

    def select(self, **keys: Any) -> Trainings:
        """The trainings with these values."""
        return [r for r in self.results if all(getattr(r, key) == value for key, value in keys.items())]


def page(record: AdaptiveDepth) -> Mapping[str, Any]:
    s, pretrained = record.settings, record.select(kind="pretrain")
    own = {
        (r.target, r.system): by_seed(record.select(kind="pretrain", target=r.target, system=r.system))
        for r in pretrained
    }
    rows = [
        [*key, found.mean, *difference_cells(found)[:2]]
        for key, found in contrasts(own, lambda key: (key[0], "gpt2")).items()
    ]
    tuned, sizes = tables(record), {r.system: count(r.parameters) for r in pretrained}
    return {
        "s": s,
        "n": s.seeds if isinstance(s.seeds, int) else len(s.seeds),
        "origin": f"\n{record.origin}\n" if record.origin else "",
        "sizes": ", ".join(f"{NAMES[system]} {size}" for system, size in sizes.items()),
        "in_all": s.pretrain + s.tune,
        "pretrained": Table(["text", "model", "loss", "minus GPT-2", "p (Holm)"], rows),
        "tuned": "\n\n".join(f"### {title}\n\n{table}" for title, table in tuned.items()),
    }


def differences(record: AdaptiveDepth, reference: str) -> dict[Key, Contrast]:
    """Reported losses of what was tuned, each against `tuned`, the GPT-2 that was tuned alike, or `scratch`, the one of
    the same text alone; all those tests are one family."""
    own = {}
    for r in record.results:
        if r.source is not None:
            key = (r.source, r.target, r.kind, r.depth)
            own[key] = by_seed(record.select(source=r.source, target=r.target, kind=r.kind, depth=r.depth))
    if reference == "tuned":
        return contrasts(own, lambda key: (*key[:3], None))
    own |= {(None, t, "scratch", None): by_seed(record.select(kind="scratch", target=t)) for _, t in record.ways}
    return contrasts(own, lambda key: (None, key[1], "scratch", None))


def tables(record: AdaptiveDepth) -> dict[str, Table]:
    """For each way and kind of tuning, the reported loss of each model, and differences paired by seed."""
    layers, tuned, scratch = record.settings.layers, differences(record, "tuned"), differences(record, "scratch")
    families = [sum(found.difference is not None for found in each.values()) for each in (tuned, scratch)]
    head = ["model", "layers", "trained", "before tuning", "after tuning"]
    head += [
        f"minus {words} (p, Holm over {m})" for words, m in zip(("GPT-2 tuned", "from scratch"), families, strict=True)
    ]
    found = {}
    for (source, target), (kind, words) in itertools.product(record.ways, KINDS.items()):
        rows: list[list[Cell]] = []
        for key in (key for key in tuned if key[:3] == (source, target, kind)):
            own, against = (
                record.select(source=source, target=target, kind=kind, depth=key[3]),
                [tuned[key], scratch[key]],
            )
            share, before = f"{own[0].trained_parameters / own[0].parameters:.1%}", by_seed(own, lambda r: r.before)
            losses = [interval(list(before.values())), tuned[key].mean, *map(_difference, against)]
            rows.append([NAMES[own[0].system], key[3] or layers, share, *losses])
        alone = scratch[None, target, "scratch", None].mean
        rows.append(["GPT-2 from scratch", layers, "100.0%", None, alone, None, None])
        found[f"{source} -> {target}: {words}"] = Table(head, rows, rule="---")
    return found


def _difference(found: Contrast) -> Cell:
    return f"{found.difference} ({number(found.p_holm)})" if found.difference else ""


def draw(record: AdaptiveDepth) -> Iterator[style.Named]:
    """For each way: loss on the watched text against steps of tuning; and against tuned GPT-2."""
    ways, s, minus = record.ways, record.settings, differences(record, "tuned")
    n = s.seeds if isinstance(s.seeds, int) else len(s.seeds)
    figure, axes = style.panels(len(ways), 3, (15.0, 0.6 + 4.2 * len(ways)))
    depths = sorted({r.depth for r in record.results if r.depth}, reverse=True)
    known = {
        (source, target, kind): {
            f"flow {s.layers} -> {d}": style.mean_curve([r.curve for r in own if r.depth == d]) for d in depths
        }
        | {"GPT-2": style.mean_curve([r.curve for r in own if r.depth is None])}
        | {"from scratch": style.mean_curve([r.curve for r in record.select(kind="scratch", target=target)])}
        for source, target in ways
        for kind in KINDS
        for own in [record.select(source=source, target=target, kind=kind)]
    }
    counts = {target: record.counts[target]["select"] for _, target in ways}
    most = [loss for own in counts.values() for k, loss in own.items() if k != "1"]
    limits = style.span([at for own in known.values() for _, curve in own.values() for at in curve], most)
    apart = style.span([found.difference for found in minus.values() if found.difference], [0.0])
    for row, (source, target) in zip(axes, ways, strict=True):
        for panel, (kind, words) in zip(row, KINDS.items(), strict=False):
            own = known[source, target, kind]
            looks = {name: style.series(k) for k, name in enumerate(own)}
            looks["GPT-2"] |= {"color": style.REFERENCE}
            for name, (steps, curve) in own.items():
                style.curve(panel, steps, curve, **looks[name])
            panel.set(title=f"{source} to {target}: {words}", xlabel="steps of tuning, or of training from scratch")
            style.loss_axis(panel, f"watched {target}", "byte", n, counts[target], limits)
            ends = {name: (steps[-1], curve[-1].mean) for name, (steps, curve) in own.items()}
            style.direct(panel, ends, {name: look["color"] for name, look in looks.items()})
        _differences(row[2], {key[2:]: at for key, at in minus.items() if key[:2] == (source, target)}, depths)
        row[2].set(
            title=f"{source} to {target}: against tuned GPT-2", ylim=apart, xlabel="layers of the flow while tuned"
        )
        row[2].set_ylabel(f"flow minus GPT-2 on unseen text (nats per byte), n = {n}")
    yield "figure", figure


def _differences(panel: Axes, minus: Mapping[tuple[str, int | None], Contrast], depths: list[int]) -> None:
    """Reported loss of the flow minus that of tuned GPT-2, paired by seed, with its interval; below 0 it is better."""
    ends, colours = {}, {}
    for k, (kind, words) in enumerate(KINDS.items()):
        own = [minus[kind, depth].difference for depth in depths]
        look = style.series(k) | {"linestyle": ""}
        style.points(panel, [depth + (-0.1, 0.1)[k] for depth in depths], own, **look)
        ends[words], colours[words] = (depths[0], own[0].mean), look["color"]
    panel.axhline(0.0, color=style.REFERENCE, linewidth=0.8)
    panel.set_xticks(depths)
    panel.grid(alpha=0.25)
    style.direct(panel, ends, colours)
