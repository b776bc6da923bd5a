"""Draws what lies in docs/assets: flow.png, the figure of the README (what a flow is), depths.png and anytime.png.

    PYTHONPATH=. python docs/figure.py

Left: a toy field, solved with few and with many steps. Right: losses from the committed results of an ablation.
The others: readings of three trained flows at many depths, and losses of n-grams (docs/assets/depths.json); loss and
speed of one of them at fewer steps, with exits and with drafts (docs/assets/anytime.json, written by
experiments.bench.anytime).
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import style
from experiments.ablations.report import Ablations, readings
from experiments.counts import BEGINNING
from experiments.records import read
from experiments.statistics import Interval
from experiments.style import COLOURS, LINES, MARKS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "ablations" / "results_jitter" / "results.json"
TARGET = ROOT / "docs" / "assets" / "flow.png"
TRAINED_AT = 6
ARMS = {  # (group, arm) -> its name here
    ("jitter_generated", "generated"): "generated weights",
    ("jitter_basis", "basis_4"): "4 smooth functions",
    ("jitter_basis", "basis_4_jitter"): "4 functions, jitter",
}


def losses(record: Ablations) -> dict[str, tuple[list[int], list[Interval]]]:
    """Of each arm steps of Euler's method, and the loss with so many."""
    found = {}
    for (group, arm), name in ARMS.items():
        own = {
            steps: c.mean
            for ((solver, steps), a), c in readings(record, group).items()
            if (solver, a) == ("euler", arm)
        }
        found[name] = list(own), list(own.values())
    return found


def field(t: float, x: np.ndarray) -> np.ndarray:
    """A toy B(x; W(t)) in the plane: a rotation whose speed and size change with t."""
    turn = 1.6 + 0.8 * np.sin(3 * t)
    return np.array([-turn * x[1] + 0.6, turn * x[0] - 0.9 * t])


def euler(steps: int) -> np.ndarray:
    """States of the toy flow, [steps + 1, 2]; W is taken at right end points, as in the paper."""
    states = [np.array([1.0, 0.0])]
    for k in range(steps):
        states.append(states[-1] + field((k + 1) / steps, states[-1]) / steps)
    return np.array(states)


def draw() -> Figure:
    """The figure."""
    record = read(Ablations, json.loads(RESULTS.read_text()))
    figure = style.empty((10.2, 3.6))
    left, right = figure.subplots(1, 2)
    _flow(left)
    found = losses(record)
    looks = style.series_of(found)
    right.set(xscale="log", xlabel="Euler steps, without further training")
    right.set_xticks([3, 4, 6, 8, 12, 24], ["3", "4", "6", "8", "12", "24"], minor=False)
    right.set_xticks([], minor=True)
    right.set_title("Trained models at other depths (95 % intervals)", fontsize=10)
    limits = style.span(
        [own for _, losses in found.values() for own in losses], counts=[record.protocol.counts[BEGINNING]]
    )
    style.losses(right, record.protocol, BEGINNING, limits)
    right.axvline(TRAINED_AT, color="grey", linewidth=0.8, linestyle=":")
    right.annotate("training depth", (TRAINED_AT, 5.0), (6.3, 5.0), color="grey", fontsize=8)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    style.curves(right, found, looks)
    return figure


def _flow(panel: Axes) -> None:
    fine = euler(600)
    panel.plot(*fine.T, color="black", linewidth=1.2, label="the flow: dx/dt = B(x; W(t))")
    for k, steps in enumerate((24, 6)):
        panel.plot(
            *euler(steps).T,
            color=COLOURS[k],
            linestyle=LINES[k],
            marker=MARKS[k],
            markersize=4,
            linewidth=1,
            label=f"{steps} steps",
        )
    panel.annotate("x(0), the embedding", fine[0], fine[0] + (-0.1, -0.15), fontsize=8)
    panel.annotate("x(1), input of the head", fine[-1], fine[-1] + (-0.05, -0.13), fontsize=8)
    panel.set(xticks=[], yticks=[], xlabel="state (toy field)")
    panel.set_title("A layer is a step of a solver", fontsize=10)
    panel.margins(x=0.25, y=0.3)
    panel.legend(frameon=False, fontsize=8, loc="lower left")


def draw_depths() -> Figure:
    """Trained flows, evaluated at other depths."""
    record = json.loads((TARGET.parent / "depths.json").read_text())
    figure = style.empty((7.0, 4.0))
    panel = figure.subplots()
    found = {name: [(row["steps"], row["loss"]) for row in rows] for name, rows in record["readings"].items()}
    _losses(panel, [loss for rows in found.values() for _, loss in rows])
    looks = style.series_of(found)
    panel.set(xscale="log", xlabel="Euler steps")
    for name, rows in found.items():
        steps, losses = zip(*rows, strict=True)
        panel.plot(steps, losses, **looks[name])
    panel.set_xticks(steps, [str(step) for step in steps], minor=False)
    panel.set_xticks([], minor=True)
    panel.spines[["top", "right"]].set_visible(False)
    style.direct(panel, {name: rows[-1] for name, rows in found.items()}, looks)
    return figure


def _losses(panel: Axes, found: list[float]) -> None:
    """An axis of losses of one training on the text of the quickstart."""
    counts = json.loads((TARGET.parent / "depths.json").read_text())["counts"]
    limits = style.span([], found, [counts])
    style.loss_axis(panel, "validation text", "byte", 1, counts, limits)


KINDS = {"steps": "fewer steps", "exit": "exits", "draft": "drafts"}


def draw_anytime() -> Figure:
    """Loss and speed of one flow against the evaluations that a token makes."""
    rows = json.loads((TARGET.parent / "anytime.json").read_text())["readings"]
    figure = style.empty((9.5, 3.8))
    panels = figure.subplots(1, 2)
    for k, (kind, name) in enumerate(KINDS.items()):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["evaluations"])
        look = {"color": COLOURS[k], "linestyle": LINES[k], "marker": MARKS[k], "label": name}
        x = [row["evaluations"] for row in own]
        panels[0].plot(x, [row["loss"] for row in own], **look)
        below, above = ([abs(row["speed"] - row[key]) for row in own] for key in ("speed_low", "speed_high"))
        panels[1].errorbar(x, [row["speed"] for row in own], yerr=[below, above], capsize=3, **look)
    _losses(panels[0], [row["loss"] for row in rows])
    panels[1].set(ylabel="tokens/s relative to the full depth")
    shares = np.linspace(min(row["evaluations"] for row in rows), full := max(row["evaluations"] for row in rows))
    panels[1].plot(shares, full / shares, color="grey", linewidth=0.8, linestyle=":", label="in proportion")
    panels[1].axhline(1.0, color="grey", linewidth=0.8)
    for panel in panels:
        panel.set(xlabel="evaluations of the field per token")
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False, fontsize=8)
    return figure


FIGURES = {"flow.png": draw, "depths.png": draw_depths, "anytime.png": draw_anytime}


def save(folder: Path | str) -> None:
    """Draws the figures into a folder, the same bytes each time."""
    for name, make in FIGURES.items():
        figure = make()
        style.make_room(figure)
        figure.savefig(Path(folder) / name, metadata={"Software": None})


if __name__ == "__main__":
    save(TARGET.parent)
