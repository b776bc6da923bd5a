"""Table and figure of the experiment, from its JSON alone."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.results import made_by
from experiments.statistics import LEVEL, interval, paired

Records = list[dict[str, Any]]
KINDS = {"full": "all weights", "lora": "LoRA and embeddings"}


def ways(results: Records) -> list[tuple[str, str]]:
    """The pairs (source, target) in their order."""
    return list(dict.fromkeys((r["source"], r["target"]) for r in results if r["kind"] in KINDS))


def select(results: Records, **keys: Any) -> Records:
    """The records with these values."""
    return [r for r in results if all(r[key] == value for key, value in keys.items())]


def by_seed(records: Records, key: str) -> dict[int, float]:
    """seed -> value."""
    return {r["seed"]: r[key] for r in records}


def table(record: dict[str, Any]) -> str:
    """Markdown: for each way and kind the reported loss of each system, and what it gains, paired by seed."""
    results, scale = record["results"], record["settings"]
    lines = [
        f"Loss in nats per byte after {scale['tune']} steps of tuning, on text that nothing was chosen by; mean and"
        f" {LEVEL:.0%} interval over {scale['seeds']} seeds (Student's t). The flow was trained with"
        f" {scale['layers']} steps; GPT-2 has {scale['layers']} layers. Differences are paired by seed; negative is"
        " better. Before tuning: on the text that was watched.",
        *(["", made_by(record)] if "command" in record else []),
        "",
        f"After {scale['pretrain']} steps of training, on its own text:",
        "",
    ]
    for text in dict.fromkeys(r["target"] for r in select(results, kind="pretrain")):
        flow, gpt2 = (
            by_seed(select(results, kind="pretrain", target=text, system=system), "report_loss")
            for system in ("flow", "gpt2")
        )
        lines.append(
            f"- {text}: flow {interval(list(flow.values()))}, GPT-2 {interval(list(gpt2.values()))}, flow minus GPT-2"
            f" {paired(flow, gpt2)}"
        )
    for source, target in ways(results):
        scratch = by_seed(select(results, kind="scratch", target=target), "report_loss")
        for kind, words in KINDS.items():
            tuned = select(results, source=source, target=target, kind=kind)
            gpt2 = by_seed(select(tuned, system="gpt2"), "report_loss")
            lines += [
                "",
                f"### {source} -> {target}: {words}",
                "",
                "| model | layers | trained | before tuning | after tuning | minus GPT-2 tuned | minus from scratch |",
                "|---|---|---|---|---|---|---|",
            ]
            for system, depth in dict.fromkeys((r["system"], r["depth"]) for r in tuned):
                own = select(tuned, system=system, depth=depth)
                after, before = by_seed(own, "report_loss"), by_seed(own, "before")
                against = "" if system == "gpt2" else str(paired(after, gpt2))
                cells = [
                    "flow" if system == "flow" else "GPT-2",
                    str(depth or scale["layers"]),
                    f"{own[0]['trained_parameters'] / own[0]['parameters']:.1%}",
                    str(interval(list(before.values()))),
                    str(interval(list(after.values()))),
                    against,
                    str(paired(after, scratch)),
                ]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append(
                f"| GPT-2 from scratch | {scale['layers']} | 100.0% | | {interval(list(scratch.values()))} | | |"
            )
    return "\n".join(lines) + "\n"


def draw(record: dict[str, Any], path: Path) -> None:
    """The figure: loss on the watched text against steps of tuning, mean and interval over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    results, scale = record["results"], record["settings"]
    directions = ways(results)
    size = (12.0, 0.8 + 3.2 * len(directions))
    figure, axes = plt.subplots(len(directions), 3, figsize=size, squeeze=False, layout="constrained")
    depths = sorted({r["depth"] for r in results if r["depth"]}, reverse=True)
    shades = plt.get_cmap("viridis")
    for row, (source, target) in zip(axes, directions, strict=True):
        row[1].sharey(row[0])
        for panel, (kind, words) in zip(row, KINDS.items(), strict=False):
            tuned = select(results, source=source, target=target, kind=kind)
            for index, depth in enumerate(depths):
                colour = shades(0.9 * index / max(len(depths) - 1, 1))
                own = select(tuned, system="flow", depth=depth)
                _band(panel, own, f"flow {scale['layers']} -> {depth}", colour, "-")
            _band(panel, select(tuned, system="gpt2"), f"GPT-2, {scale['layers']} layers", "black", "--")
            _band(panel, select(results, kind="scratch", target=target), "GPT-2 from scratch", "tab:red", ":")
            panel.set_title(f"{source} to {target}: {words}", fontsize=10)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
        row[0].set_ylabel("loss (nats per byte)")
        _differences(row[2], select(results, source=source, target=target), depths)
        row[2].set_title(f"{source} to {target}: against tuned GPT-2", fontsize=10)
        row[2].set_ylabel("flow minus GPT-2 (nats per byte)")
    for panel in axes[-1][:2]:
        panel.set_xlabel("steps of tuning")
    axes[-1][2].set_xlabel("layers of the flow while tuned")
    axes[0][2].legend(fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _differences(panel: Any, results: Records, depths: list[int]) -> None:
    """Reported loss of the flow minus that of tuned GPT-2, paired by seed, with its interval; below 0 it is better."""
    for (kind, words), shift, colour in zip(KINDS.items(), (-0.1, 0.1), ("tab:blue", "tab:orange"), strict=True):
        gpt2 = by_seed(select(results, kind=kind, system="gpt2"), "report_loss")
        own = [paired(by_seed(select(results, kind=kind, depth=depth), "report_loss"), gpt2) for depth in depths]
        where, means, halves = [depth + shift for depth in depths], [i.mean for i in own], [i.half for i in own]
        panel.errorbar(where, means, yerr=halves, fmt="o", color=colour, capsize=3, label=words)
    panel.axhline(0.0, color="black", linewidth=0.8)
    panel.set_xticks(depths)
    panel.grid(alpha=0.3)


def _band(panel: Any, records: Records, label: str, colour: Any, style: str) -> None:
    """Mean and interval over seeds; the losses before tuning are off the scale, and in the table."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for step, loss in record["curve"]:
            by_step[step].append(loss)
    steps = sorted(by_step)
    intervals = [interval(by_step[step]) for step in steps]
    means = [i.mean for i in intervals]
    panel.plot(steps, means, style, color=colour, label=label, marker="o", markersize=3)
    low, high = ([i.mean + sign * i.half for i in intervals] for sign in (-1, 1))
    panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
