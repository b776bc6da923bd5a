"""The results of the experiment: its record, and from that alone the table and the figure."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from experiments import style
from experiments.adaptive_depth.plan import Stage
from experiments.counts import Counts
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, contrasts, interval
from experiments.tables import Cell, Table, count, difference_cells, number

NAMES = {"flow": "flow", "gpt2": "GPT-2"}
KINDS = ("full", "lora")
Key = tuple[str | None, str, str, int | None]  # source, target, kind, depth


@dataclass(frozen=True)
class Settings:
    """layers: of GPT-2, and steps of the flow. pretrain, tune: numbers of training steps. seeds: or their number.
    form: of the flow's blocks. kinds: of fine-tuning, in words. noted: what was known when this was planned."""

    layers: int
    pretrain: int
    tune: int
    seeds: int | list[int]
    form: str = "parallel"  # of the records that do not say it
    kinds: dict[str, str] = field(default_factory=lambda: {"full": "all weights", "lora": "LoRA and embeddings"})
    noted: str = ""

    @property
    def n(self) -> int:
        return self.seeds if isinstance(self.seeds, int) else len(self.seeds)


@dataclass(frozen=True)
class Trained(Training, Stage):
    """before: loss on the part `select` before tuning."""

    parameters: int = 0
    trained_parameters: int = 0
    before: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptiveDepth(Record):
    """texts: name -> bytes of each part.

    Attributes:
        counts: text -> part -> losses of n-grams counted in as much of the text as a model is tuned on.
    """

    settings: Settings
    texts: dict[str, dict[str, int]]
    results: list[Trained]
    counts: dict[str, dict[str, Counts]]

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The pairs (source, target) in order."""
        return list(dict.fromkeys((r.source, r.target) for r in self.results if r.source is not None))

    def tuned(self, key: Key) -> list[Trained]:
        """The trainings of one kind, for all seeds."""
        return self.of(**dict(zip(("source", "target", "kind", "depth"), key, strict=True)))


def page(record: AdaptiveDepth) -> Mapping[str, object]:
    s, pretrained = record.settings, record.of(kind="pretrain")
    own = {
        (r.target, r.system): by_seed(record.of(kind="pretrain", target=r.target, system=r.system)) for r in pretrained
    }
    found = contrasts(own, lambda key: (key[0], "gpt2")).items()
    rows = [[*key, loss.mean, *difference_cells(loss)[:2]] for key, loss in found]
    sizes = {r.system: count(r.parameters) for r in pretrained}
    return {
        "s": s,
        "sizes": ", ".join(f"{NAMES[system]} {size}" for system, size in sizes.items()),
        "most": _most({r.system: r.parameters for r in pretrained}),
        "in_all": s.pretrain + s.tune,
        "pretrained": Table(["text", "model", "loss", "minus GPT-2", "p (Holm)"], rows),
        "tuned": "\n\n".join(f"### {title}\n\n{table}" for title, table in tables(record).items()),
    }


def _most(parameters: Mapping[str, int]) -> str:
    """What there is to say about the flow's number of parameters, between two clauses."""
    others = [n for system, n in parameters.items() if system != "flow"]
    if others and parameters.get("flow", 0) > max(others):
        return ", and no arm has as many as the flow"
    return "; the flow has no more than the others"


def differences(record: AdaptiveDepth, reference: str) -> dict[Key, Contrast]:
    """Reported losses of the tuned models, each compared with `tuned`, the GPT-2 tuned in the same way, or `scratch`,
    the GPT-2 trained only on the same text; all tests are one family."""
    keys = [(r.source, r.target, r.kind, r.depth) for r in record.results if r.source is not None]
    if reference == "tuned":
        return contrasts({key: by_seed(record.tuned(key)) for key in keys}, lambda key: (*key[:3], None))
    keys += [(None, target, "scratch", None) for _, target in record.ways]
    return contrasts({key: by_seed(record.tuned(key)) for key in keys}, lambda key: (None, key[1], "scratch", None))


def tables(record: AdaptiveDepth) -> dict[str, Table]:
    """For each way and kind of tuning, the reported loss of each model, and differences paired by seed."""
    layers, tuned, scratch = record.settings.layers, differences(record, "tuned"), differences(record, "scratch")
    families = [sum(found.difference is not None for found in each.values()) for each in (tuned, scratch)]
    words = zip(("GPT-2 tuned", "from scratch"), families, strict=True)
    head = ["model", "layers", "trained", "before tuning", "after tuning"]
    head += [f"minus {other} (p, Holm over {m})" for other, m in words]
    found = {}
    for (source, target), (kind, words) in itertools.product(record.ways, record.settings.kinds.items()):
        rows: list[list[Cell]] = []
        for key in (key for key in tuned if key[:3] == (source, target, kind)):
            own = record.tuned(key)
            share, before = f"{own[0].trained_parameters / own[0].parameters:.1%}", interval([r.before for r in own])
            losses = [before, tuned[key].mean, _difference(tuned[key]), _difference(scratch[key])]
            rows.append([NAMES[own[0].system], key[3] or layers, share, *losses])
        alone = scratch[None, target, "scratch", None].mean
        rows.append(["GPT-2 from scratch", layers, "100.0%", None, alone, None, None])
        found[f"{source} -> {target}: {words}"] = Table(head, rows, rule="---")
    return found


def _difference(found: Contrast) -> Cell:
    return f"{found.difference} ({number(found.p_holm)})" if found.difference else ""


def draw(record: AdaptiveDepth) -> Iterator[style.Named]:
    """For each way: loss on the part `select` against tuning steps; and differences to the tuned GPT-2."""
    ways, s, minus = record.ways, record.settings, differences(record, "tuned")
    figure, axes = style.panels(len(ways), 3, (15.0, 0.6 + 4.2 * len(ways)))
    depths = sorted({r.depth for r in record.results if r.depth}, reverse=True)

    known: dict[tuple[str, str, str], style.Curves] = {}
    for (source, target), kind in itertools.product(ways, KINDS):
        keys: dict[str, Key] = {f"flow {s.layers} -> {depth}": (source, target, kind, depth) for depth in depths}
        keys |= {"GPT-2": (source, target, kind, None), "from scratch": (None, target, "scratch", None)}
        found = {name: style.mean_curve([r.curve for r in record.tuned(key)]) for name, key in keys.items()}
        known[source, target, kind] = found
    counts = {target: record.counts[target]["select"] for _, target in ways}
    every = [at for own in known.values() for _, curve in own.values() for at in curve]
    limits = style.span(every, counts=counts.values())
    apart = style.span([found.difference for found in minus.values() if found.difference], [0.0])
    for row, (source, target) in zip(axes, ways, strict=True):
        for panel, (kind, words) in zip(row, s.kinds.items(), strict=False):
            own = known[source, target, kind]
            looks = style.series_of(own)
            looks["GPT-2"] |= {"color": style.REFERENCE}
            steps = "steps of fine-tuning, or of training from scratch"
            panel.set(title=f"{source} to {target}: {words}", xlabel=steps)
            style.loss_axis(panel, f"validation text of {target}", "byte", s.n, counts[target], limits)
            style.curves(panel, own, looks)
        own = {key[2:]: at for key, at in minus.items() if key[:2] == (source, target)}
        _differences(row[2], own, depths, s.kinds)
        title = f"{source} to {target}: against tuned GPT-2"
        row[2].set(title=title, ylim=apart, xlabel="layers of the flow when tuned")
        row[2].set_ylabel(f"flow minus GPT-2 on held-out text (nats per byte), n = {s.n}")
    yield "figure", figure


def _differences(
    panel: Axes, minus: Mapping[tuple[str, int | None], Contrast], depths: list[int], kinds: Mapping[str, str]
) -> None:
    """Reported loss of the flow minus that of the tuned GPT-2, paired by seed, with interval; below 0 it is better."""
    looks, ends = style.series_of(kinds.values()), {}
    for kind, words, aside in zip(kinds, looks, (-0.1, 0.1), strict=True):
        own = [minus[kind, depth].difference for depth in depths]
        style.points(panel, [depth + aside for depth in depths], own, **looks[words] | {"linestyle": ""})
        ends[words] = (depths[0], own[0].mean)
    style.zero(panel)
    panel.set_xticks(depths)
    style.direct(panel, ends, looks)
