"""Matplotlib figures of spectra, exponents and trajectories. Each function takes arrays and returns a `Figure`.

All text has one size. The caption below says what the figure shows and what would be surprising.
"""

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

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
_SIZE = 9  # points, for all text
_KEYS = (
    "axes.titlesize",
    "axes.labelsize",
    "xtick.labelsize",
    "ytick.labelsize",
    "legend.fontsize",
    "figure.titlesize",
)
_STYLE = {"font.size": _SIZE} | dict.fromkeys((*_KEYS, "figure.labelsize"), _SIZE)
_HEADS = "os^Dv<>P"  # markers; with more heads the shape is not explained
_OUTLIER = 4  # times the central 95 %: with values beyond, axes are logarithmic


def _drawn(caption: str) -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    """Gives a figure one text size and a caption."""

    def around(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        @functools.wraps(draw)
        def styled(*args, **kwargs) -> Figure:
            with rc_context(_STYLE):
                figure = draw(*args, **kwargs)
                wrapped = textwrap.fill(caption, max(40, int(15 * figure.get_figwidth())))
                figure.supxlabel(wrapped, x=0.01, ha="left", color="0.3")
                return figure

        return styled

    return around


@_drawn(
    "Shows: the eigenvalues of each head (marker) at each layer-time t (colour), the unit circle (dashed), and an"
    " untrained model (grey). Surprising: a trained model inside the grey cloud, or positive real parts of OV only at"
    " one end of t."
)
def eigenvalues(times, values: Mapping[str, np.ndarray], untrained: Mapping[str, np.ndarray] | None = None) -> Figure:
    """Eigenvalues in the complex plane, one panel per family, coloured by t.

    Args:
        values: family -> [time, ...], for heads [time, heads, count].
        untrained: the same for an untrained model.
    """
    figure = Figure(figsize=(4.2 * len(values), 5.2), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(values)))
    times = np.asarray(times)
    for ax, (family, array) in zip(axes, values.items(), strict=True):
        heads = array.reshape(len(times), -1, array.shape[-1])
        if untrained is not None and family in untrained:
            grey = np.ravel(untrained[family])
            ax.scatter(grey.real, grey.imag, c="0.6", s=3, alpha=0.35, lw=0, zorder=1)
        for head in range(heads.shape[1]):
            points = heads[:, head]
            style = {"marker": _HEADS[head % len(_HEADS)] if heads.shape[1] <= len(_HEADS) else "o"}
            colours = np.repeat(times, points.shape[1])
            style |= {"cmap": _TIME, "vmin": 0, "vmax": 1, "s": 7, "alpha": 0.6, "lw": 0}
            marks = ax.scatter(points.real.ravel(), points.imag.ravel(), c=colours, **style)
        _plane(ax, np.abs(array).ravel())
        ax.set(title=TITLES[family], xlabel="real part")
    axes[0].set_ylabel("imaginary part")
    figure.colorbar(marks, ax=axes[-1], label="layer-time t", shrink=0.7)
    _eigenvalue_legend(figure, max(np.prod(v.shape[1:-1], dtype=int) for v in values.values()), untrained is not None)
    return figure


@_drawn(
    "Shows: the median over heads (line) and their range (shade) along t, and the range of untrained models (brown)."
    " Surprising: a line that stays in the brown band, which means that training has left no trace."
)
def summaries(times, summaries: Mapping[str, Summary], bands: Mapping[str, Summary] | None = None) -> Figure:
    """Radius, share of positive real parts and symmetry against t: median and range over heads; in brown the range over
    heads and draws of untrained models."""
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


@_drawn(
    "Shows: how many directions a matrix uses: singular values by rank, median over heads, at each t (colour)."
    " Surprising: a sharp drop, which means that the matrix has low rank."
)
def singular_values(times, values: Mapping[str, np.ndarray]) -> Figure:
    """Singular values by rank, median over heads, one line per t.

    Args:
        values: family -> [time, ..., rank].
    """
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


@_drawn(
    "Shows: how strongly the output token (framed) depends on each token, after each step; the colour scale ends at the"
    " 97 % quantile of all other tokens. Surprising: a token far from the output that is neither the first nor rare."
    " One text proves nothing: compare with shuffled texts."
)
def token_map(labels: Sequence[str], exponents: np.ndarray, output_position: int = -1) -> Figure:
    """The paper's token scores: the largest exponent of each token up to each step. [steps, position, embed]"""
    scores = np.cumsum(exponents, axis=0).max(axis=-1)
    steps, length = scores.shape
    figure = Figure(figsize=(max(5.0, 1.5 + 0.26 * min(length, 60)), 2.4 + 0.24 * steps), layout="constrained")
    ax = figure.subplots()
    output = output_position % length
    others = np.delete(scores, output, axis=1) if length > 1 else scores
    low, high = min(0.0, others.min()), max(np.quantile(others, 0.97), 1e-9)
    image = ax.imshow(scores, aspect="auto", cmap=_INTENSITY, interpolation="nearest", vmin=low, vmax=high)
    ax.add_patch(Rectangle((output - 0.5, -0.5), 1, steps, fill=False, ec=_OURS, lw=2))
    ax.set_yticks(range(steps), [f"{(k + 1) / steps:.2f}" for k in range(steps)])
    every = -(-length // 60)
    ax.set_xticks(range(0, length, every), [_visible(labels[i]) for i in range(0, length, every)], rotation=90)
    ax.set(ylabel="layer-time t", title="sensitivity of the output to each token")
    figure.colorbar(image, ax=ax, label="largest exponent so far", extend="max")
    return figure


@_drawn(
    "Shows: how much the leading perturbations of the whole sequence have grown by t. Surprising: a falling line, that"
    " is, a direction that layers first amplify and then damp."
)
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
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@_drawn(
    "Shows: means over texts with 95 % intervals, and the same texts with shuffled tokens. Surprising: intervals that"
    " do not overlap; only this is due to word order."
)
def corpus(result: CorpusExponents) -> Figure:
    """Means over texts with 95 % intervals: the spectrum, and token scores by distance to the output; with shuffles."""
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


@_drawn(
    "Shows: median (line) and middle half (shade) of the tokens. Surprising: states that speed up towards t = 1, "
    "or turn back (negative cosine)."
)
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


@_drawn(
    "Shows: the loss of the next token if the model ended at t. Surprising: a token whose loss rises again with depth."
)
def lens(result: LogitLens, labels: Sequence[str] | None = None) -> Figure:
    """Loss of the logit lens: mean against t, and per token.

    Args:
        labels: the tokens of the text.
    """
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


@_drawn(
    "Shows: how evenly each head spreads its attention (1: over all tokens that it sees). Surprising: a head near 0 (it"
    " attends to one token) or near 1 (it attends uniformly) at all t."
)
def entropy(times, values: np.ndarray) -> Figure:
    """Attention entropy of each head along t, as a fraction of its maximum: mean over tokens.

    Args:
        times: of the weights of each step, `read(model).times`.
        values: [steps, heads, N].
    """
    _, heads, length = values.shape
    share = (values[..., 1:] / np.log(np.arange(2, length + 1))).mean(axis=-1) if length > 1 else values[..., 0]
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    ax = figure.subplots()
    for head in range(heads):
        ax.plot(times, share[:, head], color=colormaps["viridis"](head / heads), label=f"head {head}")
    ax.set(
        xlabel="layer-time t", ylabel="entropy / largest possible", xlim=(0, 1), ylim=(0, 1), title="attention entropy"
    )
    if heads <= 12:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """`path` with .png and .pdf appended to its name."""
    written = [path.with_name(path.name + ending) for ending in (".png", ".pdf")]
    for file in written:
        figure.savefig(file, dpi=150)
    return written


def _plane(ax, moduli: np.ndarray) -> None:
    """Axes and unit circle; logarithmic outside the centre if a few eigenvalues would squeeze all others."""
    most, central = max(moduli.max(), 1e-12), max(np.quantile(moduli, 0.95), 1e-12)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.axvline(0, color="0.8", lw=0.8, zorder=0)
    angle = np.linspace(0, 2 * np.pi, 361)
    ax.plot(np.cos(angle), np.sin(angle), color="0.4", lw=0.8, ls="--", zorder=0)
    if most > _OUTLIER * central:
        knee = max(central, most / 1e4)
        decades = [10.0**n for n in range(-8, 9) if 1.5 * knee < 10.0**n <= most]
        if len(decades) < 2:
            decades = [m * 10.0**n for n in range(-8, 9) for m in (1, 2, 5) if knee <= m * 10.0**n <= most]
        marks = [-x for x in reversed(decades)] + [0.0] + decades
        ax.set_xscale("symlog", linthresh=knee, linscale=1.5)
        ax.set_yscale("symlog", linthresh=knee, linscale=1.5)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks(marks, [f"{x:g}" for x in marks])
            axis.set_ticks([], minor=True)
    ax.set(xlim=(-1.1 * most, 1.1 * most), ylim=(-1.1 * most, 1.1 * most))
    ax.set_box_aspect(1)


def _eigenvalue_legend(figure: Figure, heads: int, untrained: bool) -> None:
    dots = {"ls": "", "ms": 5, "color": "0.2"}
    keys = [Line2D([], [], marker=_HEADS[h], label=f"head {h}", **dots) for h in range(heads)]
    keys = keys if 1 < heads <= len(_HEADS) else []
    if untrained:
        keys.append(Line2D([], [], marker="o", label="untrained", **dots | {"color": "0.6"}))
    keys.append(Line2D([], [], color="0.4", ls="--", lw=0.8, label="unit circle"))
    figure.legend(
        handles=keys,
        loc="outside upper center",
        ncols=min(len(keys), max(3, int(1.2 * figure.get_figwidth()))),
        frameon=False,
    )


def _quartiles(ax, t, values: np.ndarray, colour: str, label: str | None) -> None:
    if len(values) == 0:  # a single step does not turn
        return
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
    """A token as an axis label: blanks are visible, and a dollar sign does not start a formula."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("$", r"\$")
