"""Lyapunov exponents: how small changes of the tokens' states grow through depth.

    qkvflow lyapunov --run runs/quickstart --text "The for statement is used to iterate"

writes the token heat map, the spectrum of the whole sequence and aggregates over the validation text to
`<run>/analysis/`, as `lyapunov.npz` and figures (PNG and PDF).
"""

from dataclasses import asdict, dataclass

import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.analysis import exponents, figures
from qkvflow.analysis.corpus import CorpusExponents, mean_interval
from qkvflow.analysis.exponents import Tick
from qkvflow.analysis.exponents import kaplan_yorke as kaplan_yorke
from qkvflow.analysis.opening import EncodedText, opened, output_folder, texts_of, validation_texts, write
from qkvflow.analysis.reading import Reading, position_in, read, sequence
from qkvflow.analysis.tangent import Tangent
from qkvflow.axes import LAYERS, POSITION
from qkvflow.cli import run_program
from qkvflow.config import Text
from qkvflow.errors import UserError
from qkvflow.models.levanter_twin import enter_config


def token_exponents(
    model: LmHeadModel | Reading,
    tokens: NamedArray,
    output_position: int = -1,
    *,
    official_times: bool = False,
    tick: Tick | None = None,
) -> np.ndarray:
    """The paper's token-level sensitivity: log |diag R| of each step, float64 [steps, position, embed].

        J_n^{(k)} = d F_n(x)_j / d x_k,   Q_0 = I,   (I + h J_n^{(k)}) Q_n = Q_{n+1} R_{n+1}

    for output position j and each input position k, at the states and times of the forward pass. The paper's exponent
    of token k is the sum over steps, its score the largest of these. Tokens after j have exactly 0.

    This is not the tangent map of the flow: each token is propagated on its own, and the identity is added for k != j
    too. `spectrum` couples the tokens.

    Args:
        official_times: reproduce the official code, which uses t = n/L and the state after step n where the forward
            pass uses t = (n+1)/L and the state before it. Only for Euler flows on a uniform grid.

    Source: SDML-KU/qkvflow, analysis/lyapunov.py.
    """
    reading = _reading(model)
    tokens = sequence(reading, tokens)
    count = tokens.array.size
    position = position_in("output_position", output_position, count)
    tangent = Tangent(reading, tokens)
    if not official_times:
        return exponents.token_logs(lambda n: np.asarray(tangent.jacobian_rows(n, position)), tangent.steps, tick)
    shifted = _at_official_times(model)
    rows = Tangent(shifted, tokens, states=tangent.states).jacobian_rows
    return exponents.token_logs(lambda n: np.asarray(rows(n, position, n + 1)), tangent.steps, tick)


def spectrum(
    model: LmHeadModel | Reading,
    tokens: NamedArray,
    k: int,
    *,
    sweeps: int = 8,
    seed: int = 0,
    tick: Tick | None = None,
) -> np.ndarray:
    """The k largest finite-time Lyapunov exponents of the whole sequence's flow, float64 [k], descending.

    lambda_i = log sigma_i(d x(1) / d x(0)), all tokens coupled, per unit of layer-time (the depth is 1). Matrix-free,
    by Benettin's method from the leading directions (see `qkvflow.analysis.exponents`); memory O(k) states.

    Args:
        sweeps: maximum number of iterations that find the leading directions; 0 starts from random directions instead,
            as Benettin's method does in long-time problems, and gives lower bounds that depend on `seed`.
    """
    return step_exponents(model, tokens, k, sweeps=sweeps, seed=seed, tick=tick).sum(axis=0)


def step_exponents(
    model: LmHeadModel | Reading,
    tokens: NamedArray,
    k: int,
    *,
    sweeps: int = 8,
    seed: int = 0,
    tick: Tick | None = None,
) -> np.ndarray:
    """The exponents of `spectrum` per step, [steps, k]; their sum over steps is `spectrum`."""
    tangent = _tangent(model, tokens)
    if not 1 <= k <= tangent.size:
        raise UserError(
            f"k must lie in 1..{tangent.size}: the state has position x embed = {tangent.shape[0]} x {tangent.shape[1]}"
            f" dimensions, and each has one exponent; got {k}."
        )
    start = exponents.leading_directions(tangent, k, sweeps=sweeps, seed=seed, tick=tick)
    logs = exponents.benettin(tangent, start)
    return logs[:, np.argsort(-logs.sum(axis=0), kind="stable")]


def direction_exponents(model: LmHeadModel | Reading, tokens: NamedArray, directions) -> np.ndarray:
    """log ||v_{n+1}|| / ||v_n|| of each perturbation v_0 of x(0) separately: [steps, m] from [m, position, embed].

    The sum over steps is the finite-time exponent of the direction.
    """
    tangent = _tangent(model, tokens)
    v = np.asarray(directions.array if isinstance(directions, NamedArray) else directions, np.float64)
    if v.shape[1:] != tangent.shape or len(v) == 0:
        raise UserError(f"directions must have the shape [m, {tangent.shape[0]}, {tangent.shape[1]}], got {v.shape}.")
    norms = np.linalg.norm(v.reshape(len(v), -1), axis=1)
    if not norms.all():
        raise UserError("a direction is zero, so it has no exponent: give nonzero directions.")
    logs = []
    for n in range(tangent.steps):
        v = v / norms[:, None, None]
        v = np.asarray(tangent.forward(n, v), np.float64)
        norms = np.linalg.norm(v.reshape(len(v), -1), axis=1)
        logs.append(np.log(norms))
    return np.stack(logs)


def token_map(model: LmHeadModel | Reading, tokens, *, tick: Tick | None = None) -> NamedArray:
    """The largest growth of a perturbation of each token up to each depth: float64 {layers = steps, position}.

        lambda_i(t_n) = log sigma_max( d x(t_n) / d x_i(0) ) / t_n

    the finite-time exponent of token i at depth t_n = 1/L, ..., 1, including the effect of the perturbation on all
    tokens. Exact: embed Jacobian-vector products for each token and step.
    """
    tangent = _tangent(model, tokens)
    positions, width = tangent.shape
    found = np.empty((tangent.steps, positions))
    for i in range(positions):
        v = np.zeros((width, positions, width), np.float32)
        v[np.arange(width), i, np.arange(width)] = 1.0
        for n in range(tangent.steps):
            v = tangent.forward(n, v)
            rows = np.asarray(v, np.float64).reshape(width, -1)
            largest = np.linalg.eigvalsh(rows @ rows.T)[-1]
            found[n, i] = 0.5 * np.log(largest) * tangent.steps / (n + 1)
        if tick is not None:
            tick(i + 1, positions)
    return NamedArray(found, (LAYERS, POSITION))


def divergence(
    model: LmHeadModel | Reading, tokens: NamedArray, probes: int | None = None, seed: int = 0
) -> np.ndarray:
    """h tr(d F_n / d x) of each step, [steps]. In the limit of short steps the sum, which is the integral of the
    divergence, equals the sum of all exponents: the growth of volume.

    Args:
        probes: None for the exact trace, with one product per dimension; a number for Hutchinson's estimate.
    """
    return _tangent(model, tokens).traces(probes, seed)


def corpus_exponents(
    model: LmHeadModel | Reading, texts, k: int = 4, *, sweeps: int = 8, seed: int = 0, tick: Tick | None = None
) -> CorpusExponents:
    """Exponents of each of `texts` (tokens of equal length, [n, position]) and of each text with its tokens shuffled.

    What is the same for both is not due to word order.
    """
    reading = _reading(model)
    texts = np.asarray(texts)
    if texts.ndim != 2 or len(texts) < 2:
        raise UserError(f"texts must be at least two sequences of equal length, got an array of shape {texts.shape}.")
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(text) for text in texts]
    spectra, scores = [], []
    for done, text in enumerate([*texts, *shuffled]):
        spectra.append(spectrum(reading, text, k, sweeps=sweeps, seed=seed))
        scores.append(token_exponents(reading, text).sum(axis=0).max(axis=-1))
        if tick is not None:
            tick(done + 1, 2 * len(texts))
    n = len(texts)
    return CorpusExponents(np.stack(spectra[:n]), np.stack(spectra[n:]), np.stack(scores[:n]), np.stack(scores[n:]))


def _tangent(model, tokens) -> Tangent:
    reading = _reading(model)
    return Tangent(reading, sequence(reading, tokens))


def _reading(model: LmHeadModel | Reading) -> Reading:
    return model if isinstance(model, Reading) else read(model)


def _at_official_times(model: LmHeadModel | Reading) -> Reading:
    if isinstance(model, Reading):
        raise UserError("official_times evaluates the weights at other times than a reading has: give the model.")
    depth = enter_config(model.config).depth
    if depth.solver != "euler" or depth.step_size != "uniform":
        raise UserError(
            "official_times reproduces the official code, which only has Euler flows with step 1/L: leave it out."
        )
    try:
        return read(model, endpoint="left")
    except UserError as error:
        raise UserError(f"official_times needs weights at t = 0, which this model does not have. {error}") from None


@dataclass
class LyapunovConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
        text: the text to analyse; by default the beginning of the run's validation text.
        output_position: the token whose state is analysed; the last by default.
        k: number of exponents of the whole sequence.
        sweeps: maximum number of iterations that find the leading directions.
        official_times: use the official code's times for the token exponents.
        texts: number of validation texts for means and intervals; 0 for none.
        length: tokens of each of these texts; at most the context.
        out: output folder; `<run>/analysis` by default.
        control: control signal for the model, `[0, 1]`; zero by default.
    """

    run: str
    checkpoint_step: int | None = None
    text: Text | None = None
    output_position: int = -1
    k: int = 8
    sweeps: int = 8
    official_times: bool = False
    texts: int = 8
    length: int = 32
    out: str | None = None
    control: list[float] | None = None


def main(config: LyapunovConfig) -> dict[str, np.ndarray]:
    """Computes, writes and prints; returns the contents of `lyapunov.npz`."""
    for name, least in (("k", 1), ("sweeps", 0), ("texts", 0), ("length", 2)):
        if getattr(config, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(config, name)}")
    if config.texts == 1:
        raise UserError("texts must be at least 2, so that there is an interval, or 0 for none; got 1")
    if config.official_times and config.control is not None:
        raise UserError("official_times reproduces the official code, which has no control: leave one of the two out")
    with opened(config.run, config.checkpoint_step) as (run, progress):
        folder = output_folder(run, config.out)
        reading, (text,) = texts_of(run, None if config.text is None else [config.text], control=config.control)
        several = validation_texts(run, config.texts, config.length) if config.texts else None
        with progress.count("Token exponents") as tick:
            source = run.model if config.official_times else reading
            options = {"official_times": config.official_times, "tick": tick}
            tokens = token_exponents(source, text.ids, config.output_position, **options)
        k = min(config.k, len(text.ids) * reading.model.Embed.size)
        with progress.count("Exponents of the sequence") as tick:
            steps = step_exponents(reading, text.ids, k, sweeps=config.sweeps, tick=tick)
        arrays = {
            "tokens": text.ids,
            "labels": np.asarray(text.labels),
            "times": np.asarray(reading.ends),
            "token_exponents": tokens,
            "token_scores": tokens.sum(axis=0).max(axis=-1),
            "step_exponents": steps,
            "spectrum": steps.sum(axis=0),
            "kaplan_yorke": np.asarray(kaplan_yorke(steps.sum(axis=0))),
        }
        drawn = {
            "tokens": figures.token_map(text.labels, tokens, config.output_position),
            "spectrum": figures.growth(steps),
        }
        if several is not None:
            with progress.count(f"{len(several)} texts and their shuffles") as tick:
                corpus = corpus_exponents(reading, several, min(4, k), sweeps=config.sweeps, tick=tick)
            arrays |= {f"corpus_{name}": array for name, array in asdict(corpus).items()}
            drawn["corpus"] = figures.corpus(corpus)
        write(folder, "lyapunov", arrays, drawn)
    print(_table(text, arrays))
    if several is not None:
        print(_corpus_table(corpus))
    print(f"Written to {folder}: lyapunov.npz, " + ", ".join(f"lyapunov-{name}.png, .pdf" for name in drawn))
    return arrays


def _table(text: EncodedText, arrays: dict[str, np.ndarray]) -> str:
    scores = arrays["token_scores"]
    best = np.argsort(-scores)[:5]
    return "\n".join(
        [
            "largest exponents of the sequence:  " + "  ".join(f"{x:.3f}" for x in arrays["spectrum"]),
            "most sensitive to the tokens:       "
            + "  ".join(f"{text.labels[i]!r} ({i}) {scores[i]:.3f}" for i in best),
        ]
    )


def _corpus_table(corpus: CorpusExponents) -> str:
    mean, difference = mean_interval(corpus.spectrum), corpus.spectrum_difference
    lines = [f"{mean.count} texts, 95 % intervals      text                    text - shuffled"]
    for i in range(len(mean.mean)):
        a = f"{mean.mean[i]:.3f} [{mean.low[i]:.3f}, {mean.high[i]:.3f}]"
        b = f"{difference.mean[i]:+.3f} [{difference.low[i]:+.3f}, {difference.high[i]:+.3f}]"
        lines.append(f"exponent {i + 1:<20}{a:<24}{b}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, LyapunovConfig)
