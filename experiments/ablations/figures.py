"""Figures of the ablations, from their JSON alone: one for each group, with intervals over seeds."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.ablations.summary import Record, evaluations, lines, losses, read

_ASIDE = 1.025  # ratio of the places, on a logarithmic axis, of neighbouring curves


def draw(record: Record, folder: Path) -> None:
    """Writes `<group>.png` for each group."""
    for name in record["protocol"]["groups"]:
        figure = group(record, name)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def group(record: Record, name: str) -> Figure:
    """Left: losses of all arms, with a dot for each seed. Next: differences to the reference. Right: readings."""
    about, found, values = record["protocol"]["groups"][name], lines(record, name), losses(record, name)
    is_read = bool(about["places"])
    figure, panels = plt.subplots(1, 2 + is_read, figsize=(4.5 * (2 + is_read), 4), layout="constrained")
    for index, line in enumerate(found):
        seeds = list(values[line.arm].values())
        panels[0].plot([index + 0.15] * len(seeds), seeds, ".", color=f"C{index}", alpha=0.5)
        for panel, shown in ((panels[0], line.loss.mean), (panels[1], line.loss.difference)):
            if shown is not None:
                panel.errorbar(index, shown.mean, yerr=shown.half, fmt="o", color=f"C{index}", capsize=3)
    panels[1].axhline(0.0, color="black", linewidth=0.8)
    panels[0].set_ylabel("reported loss (nats per token)")
    panels[1].set_ylabel(f"minus {about['reference']}, paired by seed")
    for panel in panels[:2]:
        panel.set_xticks(range(len(found)), [line.arm for line in found], rotation=20, ha="right", fontsize=8)
        panel.set_xlim(-0.5, len(found) - 0.5)
        panel.grid(alpha=0.3)
    if is_read:
        _readings(panels[2], record, name)
    figure.suptitle(f"{name}, n = {found[0].loss.mean.n} seeds, 95 % intervals", fontsize=10)
    return figure


def _readings(panel: Any, record: Record, name: str) -> None:
    """Loss against evaluations of the field; a line for each solver of each arm, side by side where bars would hide
    each other."""
    against, cost = read(record, name), evaluations(record, name)
    arms = list(record["protocol"]["groups"][name]["arms"])
    solvers = list(dict.fromkeys(solver for solver, _ in cost))
    styles = dict(zip(solvers, itertools.cycle(("o-", "s--", "^:", "D-.")), strict=False))
    curves = list(itertools.product(enumerate(arms), solvers))
    for number, ((index, arm), solver) in enumerate(curves):
        at = sorted((place for place in cost if place[0] == solver), key=lambda place: cost[place])
        own = [against[place, arm].mean for place in at]
        label = f"{arm}, {solver}" if len(solvers) > 1 else arm
        aside = _ASIDE ** (number - (len(curves) - 1) / 2)
        x, y, bars = [aside * cost[place] for place in at], [i.mean for i in own], [i.half for i in own]
        panel.errorbar(x, y, yerr=bars, fmt=styles[solver], color=f"C{index}", capsize=3, markersize=4, label=label)
    panel.set(xscale="log", xlabel="evaluations of the field, read without training", ylabel="loss (nats per token)")
    ticks = sorted(set(cost.values()))
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, handlelength=4)
