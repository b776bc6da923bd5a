"""Matplotlib figures of spectra, exponents and trajectories. Each function takes arrays and returns a `Figure`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from qkvflow.analysis.corpus import CorpusExponents, Interval, bootstrap_interval, mean_interval
from qkvflow.analysis.spectrum import Summary
from qkvflow.analysis.trajectory import LogitLens, Motion

TITLES = {
    "qk": r"$W_Q W_K^\top$ (QK)",
    "ov": r"$W_V W_O$ (OV)",
    "ff": r"$W_1 W_2$ (FF)",
    "jacobian": r"$\partial F_j / \partial x_j$",
}
_TIME, _INTENSITY = colormaps["viridis"], "magma_r"
_OURS, _BASELINE = "#2a6f97", "#b08968"


def eigenvalues(times, values: Mapping[str, np.ndarray]) -> Figure:
    """Eigenvalues in the complex plane, one panel for each family, coloured by t. values: family -> [time, ...]."""
    figure = Figure(figsize=(4.2 * len(values), 4.4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(values)))
    times = np.asarray(times)
    for ax, (family, array) in zip(axes, values.items(), strict=True):
        points = array.reshape(len(times), -1)
        colours = np.repeat(times, points.shape[1])
        ax.axhline(0, color="0.8", lw=0.8, zorder=0)
        ax.axvline(0, color="0.8", lw=0.8, zorder=0)
        marks = ax.scatter(points.real, points.imag, c=colours, cmap=_TIME, vmin=0, vmax=1, s=5, alpha=0.6, lw=0)
        reach = 1.05 * max(np.abs(points).max(), 1e-12)
        ax.set(xlim=(-reach, reach), ylim=(-reach, reach), title=TITLES[family], xlabel="real part", aspect="equal")
    axes[0].set_ylabel("imaginary part")
    figure.colorbar(marks, ax=axes[-1], label="layer-time t", shrink=0.8)
    return figure


def summaries(times, summaries: Mapping[str, Summary], bands: Mapping[str, Summary] | None = None) -> Figure:
    """Radius, share of positive real parts and symmetry against t: median and range over heads; in brown the range
    over heads and draws of fresh models."""
    rows = {
        "radius": r"spectral radius $\max|\lambda|$",
        "positive": r"share with Re $\lambda > 0$",
        "symmetric": r"$\Vert S\Vert^2 / \Vert M\Vert^2$",
    }
    figure = Figure(figsize=(4.0 * len(summaries), 7.5), layout="constrained")
    axes = figure.subplots(len(rows), len(summaries), sharex=True, squeeze=False)
    for column, (family, summary) in enumerate(summaries.items()):
        axes[0, column].set_title(TITLES[family])
        axes[-1, column].set_xlabel("layer-time t")
        for row, (name, label) in enumerate(rows.items()):
            ax, value = axes[row, column], getattr(summary, name)
            heads = value.reshape(len(times), -1)
            if bands is not None:
                fresh = np.moveaxis(getattr(bands[family], name), 0, -1).reshape(len(times), -1)
                ax.fill_between(times, fresh.min(1), fresh.max(1), color=_BASELINE, alpha=0.35, lw=0, label="untrained")
            ax.fill_between(times, heads.min(1), heads.max(1), color=_OURS, alpha=0.2, lw=0)
            ax.plot(times, np.median(heads, axis=1), color=_OURS, marker="o", ms=3, label="this model")
            if name != "radius":
                ax.set_ylim(0, 1)
                ax.axhline(0.5, color="0.8", lw=0.8, zorder=0)
            else:
                ax.set_ylim(bottom=0)
            if column == 0:
                ax.set_ylabel(label)
    axes[0, 0].legend(frameon=False)
    return figure


def singular_values(times, values: Mapping[str, np.ndarray]) -> Figure:
    """Singular values by rank, median over heads, one line for each t. values: family -> [time, ..., rank]."""
    figure = Figure(figsize=(4.2 * len(values), 3.8), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(values)))
    for ax, (family, array) in zip(axes, values.items(), strict=True):
        lines = np.median(array.reshape(len(times), -1, array.shape[-1]), axis=1)
        for t, line in zip(times, lines, strict=True):
            ax.plot(np.arange(1, len(line) + 1), np.maximum(line, 1e-8), color=_TIME(t), lw=1.2)
        ax.set(title=TITLES[family], xlabel="rank", yscale="log")
    axes[0].set_ylabel("singular value")
    _time_bar(figure, axes[-1])
    return figure


def token_map(labels: Sequence[str], exponents: np.ndarray) -> Figure:
    """The paper's token scores: the largest exponent of each token so far, after each step. [steps, position, embed]"""
    scores = np.cumsum(exponents, axis=0).max(axis=-1)
    steps, length = scores.shape
    figure = Figure(figsize=(max(5.0, 1.5 + 0.26 * min(length, 60)), 1.6 + 0.24 * steps), layout="constrained")
    ax = figure.subplots()
    image = ax.imshow(scores, aspect="auto", cmap=_INTENSITY, interpolation="nearest", vmin=min(0.0, scores.min()))
    ax.set_yticks(range(steps), [f"{(k + 1) / steps:.2f}" for k in range(steps)])
    every = -(-length // 60)
    ax.set_xticks(range(0, length, every), [_visible(labels[i]) for i in range(0, length, every)], rotation=90)
    ax.set(ylabel="layer-time t", title="sensitivity of the output to each token")
    figure.colorbar(image, ax=ax, label="largest exponent so far")
    return figure


def growth(step_exponents: np.ndarray) -> Figure:
    """Cumulative exponents of the whole sequence's flow along t. [steps, k]"""
    steps, k = step_exponents.shape
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    ax = figure.subplots()
    sums = np.concatenate([np.zeros((1, k)), np.cumsum(step_exponents, axis=0)])
    for i in range(k):
        colour = colormaps["viridis"](i / max(k - 1, 1) * 0.9)
        ax.plot(
            np.linspace(0, 1, steps + 1), sums[:, i], color=colour, label=rf"$\lambda_{{{i + 1}}}$ = {sums[-1, i]:.3f}"
        )
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set(xlabel="layer-time t", ylabel="growth of the perturbation (log)", title="leading directions of the sequence")
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def corpus(result: CorpusExponents) -> Figure:
    """Means over texts and 95 % intervals: the spectrum, and token scores by distance to the output; with shuffles."""
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    k, n = result.spectrum.shape[1], len(result.spectrum)
    series = (("text", result.spectrum, result.scores), ("shuffled", result.shuffled_spectrum, result.shuffled_scores))
    for (name, spectrum, scores), colour in zip(series, (_OURS, _BASELINE), strict=True):
        interval = mean_interval(spectrum)
        error = [interval.mean - interval.low, interval.high - interval.mean]
        shift = 0.08 if name == "shuffled" else -0.08
        left.errorbar(np.arange(1, k + 1) + shift, interval.mean, error, fmt="o", color=colour, capsize=3, label=name)
        _band(right, np.arange(scores.shape[1])[::-1], bootstrap_interval(scores), colour, name)
    left.set(xlabel="exponent", ylabel="log growth", title=f"largest exponents, {n} texts, 95 % intervals")
    left.set_xticks(range(1, k + 1))
    right.set(xlabel="distance to the output token", ylabel="token score", title="sensitivity by distance")
    left.legend(frameon=False)
    return figure


def motion(result: Motion) -> Figure:
    """Speed, turning and displacement along t: median and quartiles over tokens."""
    steps = len(result.speed)
    ends = np.linspace(0, 1, steps + 1)
    middles = (ends[:-1] + ends[1:]) / 2
    panels = (
        ("speed $\\Vert dx/dt\\Vert$", middles, result.speed),
        ("cosine", ends[1:-1], result.turning),
        ("displacement from x(0), relative", ends, result.displacement),
    )
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for ax, (label, t, values) in zip(figure.subplots(1, 3), panels, strict=True):
        _quartiles(ax, t, values, _OURS, "with the next step" if label == "cosine" else None)
        ax.set(xlabel="layer-time t", ylabel=label, xlim=(0, 1))
        if label == "cosine":
            _quartiles(ax, middles, result.outward, _BASELINE, "with x")
            ax.set_ylim(-1, 1)
            ax.legend(frameon=False)
        else:
            ax.set_ylim(bottom=0)
    return figure


def lens(result: LogitLens, labels: Sequence[str] | None = None) -> Figure:
    """Loss of the logit lens: mean against t, and of each token. labels: the tokens of the text."""
    steps, length = result.loss.shape
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    ends = np.linspace(0, 1, steps)
    _quartiles(left, ends, result.loss, _OURS, None)
    left.set(xlabel="layer-time t", ylabel="loss of the next token (nats)", ylim=(0, None))
    image = right.imshow(result.loss, aspect="auto", cmap=_INTENSITY, interpolation="nearest")
    right.set_yticks(range(steps), [f"{t:.2f}" for t in ends])
    right.set_ylabel("layer-time t")
    if labels is not None:
        every = -(-length // 60)
        right.set_xticks(
            range(0, length, every), [_visible(labels[i + 1]) for i in range(0, length, every)], rotation=90
        )
    right.set_xlabel("next token")
    figure.colorbar(image, ax=right, label="nats")
    return figure


def entropy(values: np.ndarray) -> Figure:
    """Attention entropy of each head along t, as a share of the most it can be: mean over tokens. [steps, heads, N]"""
    steps, heads, length = values.shape
    share = (values[..., 1:] / np.log(np.arange(2, length + 1))).mean(axis=-1) if length > 1 else values[..., 0]
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    ax = figure.subplots()
    for head in range(heads):
        ax.plot(
            np.arange(steps) / steps, share[:, head], color=colormaps["viridis"](head / heads), label=f"head {head}"
        )
    ax.set(xlabel="layer-time t", ylabel="entropy / largest possible", ylim=(0, 1), title="attention entropy")
    if heads <= 12:
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """`path` with .png and .pdf appended to its name."""
    written = [path.with_name(path.name + ending) for ending in (".png", ".pdf")]
    for file in written:
        figure.savefig(file, dpi=150)
    return written


def _quartiles(ax, t, values: np.ndarray, colour: str, label: str | None) -> None:
    low, middle, high = np.nanpercentile(values, (25, 50, 75), axis=1)
    ax.fill_between(t, low, high, color=colour, alpha=0.2, lw=0)
    ax.plot(t, middle, color=colour, marker="o", ms=3, label=label)


def _band(ax, x, interval: Interval, colour: str, label: str) -> None:
    ax.fill_between(x, interval.low, interval.high, color=colour, alpha=0.25, lw=0)
    ax.plot(x, interval.mean, color=colour, label=label)


def _time_bar(figure: Figure, ax) -> None:
    from matplotlib.cm import ScalarMappable

    figure.colorbar(ScalarMappable(cmap=_TIME), ax=ax, label="layer-time t")


def _visible(token: str) -> str:
    """A token on an axis: blanks are seen, and no dollar sign begins a formula."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("$", r"\$")
