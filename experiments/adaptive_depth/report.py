"""What the experiment has found: its record, and from that alone the table and the figure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments import style
from experiments.adaptive_depth.plan import Stage
from experiments.records import Record, Training, by_seed
from experiments.statistics import Interval, interval, paired
from experiments.tables import Cell, Table, bullets

KINDS = {"full": "all weights", "lora": "LoRA and embeddings"}
Trainings = list["Trained"]


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
    """texts: name -> bytes of each part."""

    settings: Settings
    texts: dict[str, dict[str, int]]
    results: list[Trained]

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The pairs (source, target) in their order."""
        return list(dict.fromkeys((r.source, r.target) for r in self.results if r.source is not None))

    def select(self, **keys: Any) -> Trainings:
        """The trainings with these values."""
        return [r for r in self.results if all(getattr(r, key) == value for key, value in keys.items())]


def page(record: AdaptiveDepth) -> Mapping[str, Any]:
    s, pretrained = record.settings, record.select(kind="pretrain")
    lines = []
    for text in dict.fromkeys(r.target for r in pretrained):
        flow, gpt2 = (by_seed([r for r in pretrained if (r.target, r.system) == (text, x)]) for x in ("flow", "gpt2"))
        lines.append(f"{text}: flow {_mean(flow)}, GPT-2 {_mean(gpt2)}, flow minus GPT-2 {paired(flow, gpt2)}")
    tuned = [
        f"### {source} -> {target}: {words}\n\n{_tuned(record, source, target, kind)}"
        for source, target in record.ways
        for kind, words in KINDS.items()
    ]
    return {
        "s": s,
        "n": s.seeds if isinstance(s.seeds, int) else len(s.seeds),
        "origin": f"\n{record.origin}\n" if record.origin else "",
        "pretrained": bullets(lines),
        "tuned": "\n\n".join(tuned),
    }


def _tuned(record: AdaptiveDepth, source: str, target: str, kind: str) -> Table:
    """For each model its reported loss, and what it gains, paired by seed."""
    layers, scratch = record.settings.layers, by_seed(record.select(kind="scratch", target=target))
    tuned = record.select(source=source, target=target, kind=kind)
    gpt2 = by_seed([r for r in tuned if r.system == "gpt2"])
    rows: list[list[Cell]] = []
    for system, depth in dict.fromkeys((r.system, r.depth) for r in tuned):
        own = [r for r in tuned if (r.system, r.depth) == (system, depth)]
        after, before = by_seed(own), by_seed(own, lambda r: r.before)
        name, against = ("GPT-2", "") if system == "gpt2" else ("flow", paired(after, gpt2))
        share = f"{own[0].trained_parameters / own[0].parameters:.1%}"
        losses = [_mean(before), _mean(after), against, paired(after, scratch)]
        rows.append([name, depth or layers, share, *losses])
    rows.append(["GPT-2 from scratch", layers, "100.0%", None, _mean(scratch), None, None])
    head = ["model", "layers", "trained", "before tuning", "after tuning", "minus GPT-2 tuned", "minus from scratch"]
    return Table(head, rows, rule="---")


def _mean(values: dict[int, float]) -> Interval:
    return interval(list(values.values()))


def draw(record: AdaptiveDepth) -> Iterator[style.Named]:
    """For each way: loss on the watched text against steps of tuning; and against tuned GPT-2."""
    ways, layers = record.ways, record.settings.layers
    figure, axes = style.panels(len(ways), 3, (12.0, 0.8 + 3.2 * len(ways)))
    depths = sorted({r.depth for r in record.results if r.depth}, reverse=True)
    for row, (source, target) in zip(axes, ways, strict=True):
        row[1].sharey(row[0])
        for panel, (kind, words) in zip(row, KINDS.items(), strict=False):
            tuned = record.select(source=source, target=target, kind=kind)
            for depth, shade in zip(depths, style.shades(len(depths)), strict=True):
                _curve(panel, [r for r in tuned if r.depth == depth], f"flow {layers} -> {depth}", shade, 0)
            gpt2 = [r for r in tuned if r.system == "gpt2"]
            _curve(panel, gpt2, f"GPT-2, {layers} layers", style.STYLE.reference, 1)
            _curve(panel, record.select(kind="scratch", target=target), "GPT-2 from scratch", style.colour(3), 2)
            panel.set_title(f"{source} to {target}: {words}", fontsize=10)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
        row[0].set_ylabel("loss (nats per byte)")
        _differences(row[2], record.select(source=source, target=target), depths)
        row[2].set_title(f"{source} to {target}: against tuned GPT-2", fontsize=10)
        row[2].set_ylabel("flow minus GPT-2 (nats per byte)")
    for panel in axes[-1][:2]:
        panel.set_xlabel("steps of tuning")
    axes[-1][2].set_xlabel("layers of the flow while tuned")
    axes[0][2].legend(fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    yield "figure", figure


def _differences(panel: Axes, results: Trainings, depths: list[int]) -> None:
    """Reported loss of the flow minus that of tuned GPT-2, paired by seed, with its interval; below 0 it is better."""
    for k, (kind, words) in enumerate(KINDS.items()):
        own = {d: by_seed([r for r in results if (r.kind, r.depth) == (kind, d)]) for d in [None, *depths]}
        minus = [paired(own[depth], own[None]) for depth in depths]
        where = [depth + (-0.1, 0.1)[k] for depth in depths]
        style.points(panel, where, minus, fmt="o", color=style.colour(k), label=words)
    panel.axhline(0.0, color=style.STYLE.reference, linewidth=0.8)
    panel.set_xticks(depths)
    panel.grid(alpha=0.3)


def _curve(panel: Axes, trainings: Trainings, label: str, colour: Any, line: int) -> None:
    """The losses before tuning are off the scale, and in the table."""
    look = {"color": colour, "linestyle": style.line(line), "marker": "o", "markersize": 3}
    style.curve(panel, *style.mean_curve([r.curve for r in trainings]), label=label, **look)
