"""Draws what lies in docs/assets: flow.png, the figure of the README (what a flow is), depths.png and anytime.png.

    python docs/figure.py

Left: a toy field, solved with few and with many steps. Right: losses from the committed results of an ablation.
The others: readings of three trained flows at many depths (docs/assets/depths.json); loss and speed of one of them at
fewer steps, with exits and with drafts (docs/assets/anytime.json, written by experiments.bench.anytime).
"""

import json
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.statistics import interval
from experiments.style import COLOURS, LINES, MARKS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "ablations" / "results_600_steps" / "results.json"
TARGET = ROOT / "docs" / "assets" / "flow.png"
GROUP, TRAINED_AT = "time_sampling", 6
ARMS = {"fixed": "trained on one grid", "jitter": "trained on jittered grids"}


def losses(record: dict) -> dict[str, list[tuple[int, float, float]]]:
    """Of each arm (steps, mean, half of the 95 % interval) of Euler's method, over the seeds."""
    arms = record["protocol"]["groups"][GROUP]["arms"]
    found = {}
    for arm in ARMS:
        by_steps: dict[int, list[float]] = {}
        for result in record["results"]:
            if result["model"] == arms[arm]["model"]:
                for reading in result["readings"]:
                    if reading["solver"] == "euler":
                        by_steps.setdefault(reading["steps"], []).append(reading["loss"])
        own = {steps: interval(values) for steps, values in sorted(by_steps.items())}
        found[arm] = [(steps, i.mean, i.half) for steps, i in own.items()]
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
    record = json.loads(RESULTS.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), dpi=150, layout="constrained")
    _flow(left)
    for k, (arm, rows) in enumerate(losses(record).items()):
        steps, means, halves = np.array(rows).T
        right.plot(steps, means, color=COLOURS[k], linestyle=LINES[k], marker=MARKS[k], label=ARMS[arm])
        right.fill_between(steps, means - halves, means + halves, color=COLOURS[k], alpha=0.15, linewidth=0)
    right.axvline(TRAINED_AT, color="grey", linewidth=0.8, linestyle=":")
    right.annotate("training depth", (TRAINED_AT, 4.9), (6.4, 4.9), color="grey", fontsize=8)
    right.set(xscale="log", xlabel="Euler steps, without further training", ylabel="loss (nats per byte)")
    right.set_xticks([3, 4, 6, 8, 12, 24], ["3", "4", "6", "8", "12", "24"], minor=False)
    right.set_xticks([], minor=True)
    right.set_title("One trained model, evaluated at other depths", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
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
    readings = json.loads((TARGET.parent / "depths.json").read_text())["readings"]
    figure, panel = plt.subplots(figsize=(6.0, 3.2), dpi=150, layout="constrained")
    for k, (name, rows) in enumerate(readings.items()):
        steps, losses = zip(*((row["steps"], row["loss"]) for row in rows), strict=True)
        panel.plot(steps, losses, color=COLOURS[k], linestyle=LINES[k], marker=MARKS[k], label=name)
    panel.set(xscale="log", xlabel="Euler steps", ylabel="loss (nats per byte), n = 1")
    panel.set_xticks(steps, [str(step) for step in steps], minor=False)
    panel.set_xticks([], minor=True)
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


KINDS = {"steps": "fewer steps", "exit": "exits", "draft": "drafts"}


def draw_anytime() -> Figure:
    """Loss and speed of one flow against the evaluations that a token makes."""
    rows = json.loads((TARGET.parent / "anytime.json").read_text())["readings"]
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.2), dpi=150, layout="constrained")
    for k, (kind, name) in enumerate(KINDS.items()):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["evaluations"])
        look = {"color": COLOURS[k], "linestyle": LINES[k], "marker": MARKS[k], "label": name}
        x = [row["evaluations"] for row in own]
        panels[0].plot(x, [row["loss"] for row in own], **look)
        below, above = ([abs(row["speed"] - row[key]) for row in own] for key in ("speed_low", "speed_high"))
        panels[1].errorbar(x, [row["speed"] for row in own], yerr=[below, above], capsize=3, **look)
    panels[0].set(ylabel="loss (nats per byte), n = 1")
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
        make().savefig(Path(folder) / name, metadata={"Software": None})


if __name__ == "__main__":
    save(TARGET.parent)
