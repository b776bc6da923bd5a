"""Figures of the experiment, from its JSON alone; bands and bars are confidence intervals over seeds. PNG and PDF."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from experiments.gradient_flow.summary import Record, of_system
from experiments.statistics import interval

# Told apart in grey too.
STYLES = {"baseline": ("black", "--"), "hybrid": ("tab:blue", "-"), "shallow": ("tab:orange", ":")}
_SMOOTHED = 25  # a curve is averaged over 1 / _SMOOTHED of its steps


def draw(record: Record, folder: Path) -> None:
    """Writes `gradient_flow` and `invariance`, each as .png and .pdf."""
    for name, figure in (("gradient_flow", gradient_flow(record)), ("invariance", invariance(record))):
        for ending in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{ending}", dpi=200)
        plt.close(figure)


def gradient_flow(record: Record) -> Figure:
    """By step: training loss; total norm before clipping; norms of the flow and of the layers that it replaces."""
    p = record["protocol"]
    steps = p["num_train_steps"]
    window = max(1, steps // _SMOOTHED)
    figure, (loss, total, middle) = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
    middle.set_yscale("log")  # before its bands are drawn, which ask for it
    for system in p["systems"]:
        own = of_system(record, system)
        _band(loss, [r["loss"] for r in own], window, system, system)
        _band(total, [r["norms"]["total"] for r in own], window, system, system)
    for system, words in (("baseline", "baseline, layers in its place"), ("hybrid", "hybrid, flow")):
        _band(middle, [r["norms"]["flow"] for r in of_system(record, system)], window, system, words)
    _level(loss, record["unigram"], "single tokens")
    clip = of_system(record, "hybrid")[0]["clip"]
    if clip:
        _level(total, clip, "clipped above")
    loss.set(title="training loss", ylabel="nats per token")
    total.set(title="gradient, before clipping", ylabel="norm of the whole")
    middle.set(title="gradient, before clipping", ylabel="norm of the middle")
    for panel in (loss, total, middle):
        panel.set_xlabel(f"steps (mean of {window})")
        panel.legend(fontsize=7.5)
        panel.grid(alpha=0.3)
    figure.supxlabel(f"mean and 95 % interval over n = {len(p['seeds'])} seeds", fontsize=8)
    return figure


def invariance(record: Record) -> Figure:
    """Left: divergence of logits against evaluations of the field, by solver. Right: share against refinement, of the
    flow and of the negative control."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    own = of_system(record, "hybrid")
    for solver, marker in zip(dict.fromkeys(r["solver"] for r in own[0]["readings"]), "os^Dv*Px", strict=False):
        at = [i for i, r in enumerate(own[0]["readings"]) if r["solver"] == solver]
        x = [own[0]["readings"][i]["evaluations"] for i in at]
        _bars(left, x, [[r["readings"][i]["divergence"] for r in own] for i in at], label=solver, fmt=f"{marker}-")
    gone = interval([r["refined"]["left_out"]["divergence"] for r in own]).mean
    _level(left, gone, "flow left out")
    left.set(xlabel="evaluations of the field", ylabel="divergence of logits", title="the trained flow")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(ScalarFormatter())
    factors = record["protocol"]["refinements"]
    for system, words in (("baseline", "baseline's layers"), ("hybrid", "flow")):
        colour, line = STYLES[system]
        shares = [[r["refined"]["refined"][i]["share"] for r in of_system(record, system)] for i in range(len(factors))]
        _bars(right, factors, shares, label=words, fmt=f"o{line}", color=colour)
    right.set(xlabel="m: steps of 1/m of the trained length", ylabel="share of what the middle does", title="refined")
    right.set_xticks(factors)
    for panel in (left, right):
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7.5)
        panel.grid(alpha=0.3)
    return figure


def _band(panel: Any, curves: list[list[float]], window: int, system: str, label: str) -> None:
    """Mean and interval over seeds of curves, each averaged over windows of steps."""
    kernel = np.ones(window) / window
    smooth = [np.convolve(curve, kernel, "valid") for curve in curves]
    own = [interval(values) for values in zip(*smooth, strict=True)]
    means, halves = np.array([i.mean for i in own]), np.array([i.half for i in own])
    steps = np.arange(len(means)) + window
    colour, line = STYLES[system]
    panel.plot(steps, means, line, color=colour, label=label, linewidth=1.4)
    low = means - halves
    if panel.get_yscale() == "log":  # which has no room below zero
        low = np.maximum(low, means / 10)
    panel.fill_between(steps, low, means + halves, color=colour, alpha=0.18, linewidth=0)


def _level(panel: Any, y: float, words: str) -> None:
    """A line across, with words at its right end."""
    panel.axhline(y, color="grey", linewidth=0.8)
    where = panel.get_yaxis_transform()
    panel.text(0.99, y, words, transform=where, fontsize=7, color="dimgrey", ha="right", va="top")


def _bars(panel: Any, x: list[int], values: list[list[float]], **style: Any) -> None:
    own = [interval(v) for v in values]
    panel.errorbar(x, [i.mean for i in own], yerr=[i.half for i in own], capsize=3, markersize=4, **style)
