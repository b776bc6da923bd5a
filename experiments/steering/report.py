"""The results of the experiment: its record, and from that alone tables and the figure."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from experiments import style
from experiments.counts import Counts, about
from experiments.records import Record, Training, by_seed
from experiments.statistics import Contrast, Interval, contrasts, interval
from experiments.steering.plan import Named, SteeringConfig
from experiments.tables import Table, bullets, code, count, difference_cells

AGAINST_TOKEN = "steered minus token"


@dataclass(kw_only=True)
class SteeringProtocol(SteeringConfig):
    """a, b: names of the texts. learning_rate, steps: of the trainings.

    Attributes:
        counts: losses of n-grams on the parts `report`, means over both texts; the n-grams are counted in the first
            bytes of the parts `train`, `counted` in total, as many as a model trains on.
    """

    a: str = "A"
    b: str = "B"
    learning_rate: float
    steps: int
    counted: int
    counts: Counts


@dataclass(frozen=True)
class Source:
    """A text. parts: description of each; bytes: of each."""

    name: str
    parts: dict[str, str]
    bytes: dict[str, int]


@dataclass(frozen=True)
class Bound:
    """The judge on real pieces of the parts `report`. shares: of A and of B classified as B. pieces: their number."""

    shares: list[float]
    accuracy: float
    pieces: int


@dataclass(frozen=True)
class Trained(Training, Named):
    """
    Attributes:
        accuracy: share of samples under u = 0 and u = 1 classified as the requested text.
        losses: under `right`, `wrong` and `none`, means over both texts' parts `report`; `report_loss` is the one under
            `right`.
        judged_b: share of samples classified as text B, for each u of `between` (0 and 1 with control tokens) and for
            `none`; examples of samples.
    """

    accuracy: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    judged_b: dict[str, float] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def numbers(self) -> dict[str, object]:
        """As a row of CSV."""
        losses = {f"loss {kind}": loss for kind, loss in self.losses.items()}
        return vars(self) | losses | {f"judged_b {u}": share for u, share in self.judged_b.items()}


@dataclass(frozen=True, kw_only=True)
class Steering(Record):
    """texts: A, B. arms: name -> description. parameters: of each; older records lack it. judge: its upper bound."""

    protocol: SteeringProtocol
    texts: list[Source]
    arms: dict[str, str]
    parameters: dict[str, int] = field(default_factory=dict)
    judge: Bound
    results: list[Trained]

    @property
    def ways(self) -> list[str]:
        """The controls under which samples are drawn."""
        return [*map(str, self.protocol.between), "none"]

    def judged_b(self, arm: str, u: str) -> Interval | None:
        """None where the arm has no such control."""
        found = [r.judged_b[u] for r in self.of(arm=arm) if u in r.judged_b]
        return interval(found) if found else None


def accuracies(record: Steering) -> dict[str, Contrast]:
    """Accuracy of the samples, against chance, and of `steered` against `token`; one family of tests."""
    own = {arm: by_seed(record.of(arm=arm), lambda r: r.accuracy) for arm in record.arms}
    own["chance"] = dict.fromkeys(record.protocol.seeds, 0.5)
    if "token" in own:
        own[AGAINST_TOKEN] = own["steered"]
    return contrasts(own, lambda arm: "token" if arm == AGAINST_TOKEN else "chance")


def against_token(record: Steering) -> str | None:
    """Accuracy of the samples, steered minus token, in words; None in a record without the latter."""
    if "token" not in record.arms:
        return None
    found = accuracies(record)
    difference, p = difference_cells(found[AGAINST_TOKEN])[:2]
    return f"{difference} (p = {p}; family of {len(found) - 1}, n = {record.protocol.n})"


def losses(record: Steering) -> dict[tuple[str, str], Contrast]:
    """(arm, control) -> loss, against the right control; all are one family of tests."""
    kinds = itertools.product(record.arms, ("right", "wrong", "none"))
    own = {(arm, kind): by_seed(record.of(arm=arm), lambda r, kind=kind: r.losses[kind]) for arm, kind in kinds}
    return contrasts(own, lambda key: (key[0], "right"))


def page(record: Steering) -> Mapping[str, object]:
    p, judge, right = record.protocol, record.judge, accuracies(record)
    a, b = (text.name for text in record.texts)
    texts = [
        f"{letter}: {text.name} ({', '.join(f'{part} {what}' for part, what in text.parts.items())})"
        for letter, text in zip("AB", record.texts, strict=True)
    ]
    judged = [[arm, right[arm].mean, *difference_cells(right[arm])[:2]] for arm in record.arms]
    judged.append([f"real text ({judge.pieces} pieces): upper bound", f"{judge.accuracy:.3f}", "", ""])
    judged.append(["chance", "0.500", "", ""])
    shares = [[arm, *(record.judged_b(arm, u) for u in record.ways)] for arm in record.arms]
    kinds = [[*key, found.mean, *difference_cells(found)[:2]] for key, found in losses(record).items()]
    sizes = {arm: f" ({count(size)} parameters)" for arm, size in record.parameters.items()}
    first = record.of(arm="steered")[0]
    asked = {u: "no control" if u == "none" else f"u = {u}" for u in record.ways}
    return {
        "counts": about(p.counts),
        "seeds": ", ".join(map(str, p.seeds)),
        "texts": "; ".join(texts),
        "arms": bullets(f"`{arm}`: {words}{sizes.get(arm, '')}." for arm, words in record.arms.items()),
        "a": a,
        "b": b,
        "token": against_token(record),
        "judged": Table(["model", "judged as the requested text", "minus chance", "p (Holm)"], judged),
        "ways": Table(["model", *asked.values()], shares),
        "losses": Table(["model", "control", "loss", "minus right control", "p (Holm)"], kinds),
        "examples": bullets(f"{words}: {code(repr(text))}" for u, words in asked.items() for text in first.examples[u]),
    }


def files(record: Steering) -> dict[str, Table]:
    """CSV of each training."""
    return {"runs.csv": Table.of(r.numbers() for r in record.results)}


def draw(record: Steering) -> Iterator[style.Named]:
    """Left: share classified as B against u. Right: loss under right, wrong and no control. Bars: intervals."""
    p, heard = record.protocol, losses(record)
    figure, ((left, right),) = style.panels(1, 2, (12, 4.8))
    b, ends, last, looks = record.texts[1].name, {}, {}, style.series_of(record.arms)
    for k, (arm, look) in enumerate(looks.items()):
        aside, loose = 0.015 * k, {**look, "linestyle": ""}
        shares = {u: share for u in record.ways if (share := record.judged_b(arm, u))}
        none = shares.pop("none")
        # A line says that there is something between its points.
        line = look if len(shares) == len(p.between) else loose
        style.points(left, [float(u) + aside for u in shares], [*shares.values()], **line)
        style.points(left, [1.2 + aside], [none], **loose)
        ends[arm] = (1.2 + aside, none.mean)
        for place, kind in enumerate(("right", "wrong", "none")):
            style.points(right, [place + 0.15 * k], [heard[arm, kind].mean], **look)
        last[arm] = (2 + 0.15 * k, heard[arm, "none"].mean.mean)
    for share, words in zip(record.judge.shares, ("A", "B"), strict=True):
        style.level(left, share, f"real {words}")
    style.level(left, 0.5, "chance")
    left.set_xticks([*p.between, 1.2], [*map(str, p.between), "no control"], fontsize=8)
    left.set(xlabel="control (1 - u, u)", ylabel=f"share of samples judged as {b}, n = {p.n}", ylim=(-0.05, 1.05))
    style.direct(left, ends, looks)
    middle = 0.07 * (len(looks) - 1)
    right.set_xticks([middle, 1 + middle, 2 + middle], ["right", "wrong", "none"])
    limits = style.span([found.mean for found in heard.values()], counts=[p.counts])
    style.loss_axis(right, "held-out text of both", "byte", p.n, p.counts, limits)
    right.set_xlabel("control")
    style.direct(right, last, looks)
    figure.suptitle(f"{p.samples} samples of each seed; {style.about_bars(p.n)}", fontsize=10)
    yield "figure", figure
