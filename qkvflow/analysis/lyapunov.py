"""Lyapunov exponents: how small changes of the tokens' states grow on the way through depth.

    python -m qkvflow.analysis.lyapunov --run runs/quickstart --text "The for statement is used to iterate"

writes the token heat map, the spectrum of the whole sequence and aggregates over the validation text into
`<run>/analysis/`, as `lyapunov.npz` and figures (PNG and PDF).
"""

import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.analysis import exponents
from qkvflow.analysis.exponents import Tick
from qkvflow.analysis.exponents import kaplan_yorke as kaplan_yorke
from qkvflow.analysis.reading import Reading, read, sequence
from qkvflow.analysis.tangent import Tangent
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel


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

    This is not the tangent map of the flow: each token is followed by itself, and the identity is added for k != j too.
    `spectrum` couples the tokens.

    official_times: reproduce the official code, which takes t = n/L and the state after step n where the forward pass
        takes t = (n+1)/L and the state before it. Of flows by Euler on a uniform grid only.
    Source: SDML-KU/qkvflow, analysis/lyapunov.py.
    """
    reading = _reading(model)
    tokens = sequence(reading, tokens)
    count = tokens.array.size
    if not -count <= output_position < count:
        raise UserError(f"output_position must lie in {-count}..{count - 1} for {count} tokens, got {output_position}.")
    position = output_position % count
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
    sweeps: int = 12,
    seed: int = 0,
    tick: Tick | None = None,
) -> np.ndarray:
    """The k largest finite-time Lyapunov exponents of the whole sequence's flow, float64 [k], descending.

    lambda_i = log sigma_i(d x(1) / d x(0)), all tokens coupled, per unit of layer-time (which is 1). Matrix-free, by
    Benettin's method from the leading directions (see `qkvflow.analysis.exponents`); memory O(k) states.

    sweeps: at most, of the iteration that finds the leading directions; 0 starts from random directions instead, as
        Benettin's method does in long-time problems, and gives lower bounds that depend on `seed`.
    """
    return step_exponents(model, tokens, k, sweeps=sweeps, seed=seed, tick=tick).sum(axis=0)


def step_exponents(
    model: LmHeadModel | Reading,
    tokens: NamedArray,
    k: int,
    *,
    sweeps: int = 12,
    seed: int = 0,
    tick: Tick | None = None,
) -> np.ndarray:
    """The exponents of `spectrum` step by step, [steps, k]; their sum over steps is `spectrum`."""
    tangent = _tangent(model, tokens)
    if not 1 <= k <= tangent.size:
        raise UserError(
            f"k must lie in 1..{tangent.size}: the state has position x embed = {tangent.shape[0]} x"
            f" {tangent.shape[1]} dimensions, and each has one exponent. Got {k}."
        )
    start = exponents.leading_directions(tangent, k, sweeps=sweeps, seed=seed, tick=tick)
    logs = exponents.benettin(tangent, start)
    return logs[:, np.argsort(-logs.sum(axis=0), kind="stable")]


def direction_exponents(model: LmHeadModel | Reading, tokens: NamedArray, directions) -> np.ndarray:
    """log ||v_{n+1}|| / ||v_n|| of each perturbation v_0 of x(0) by itself: [steps, m] from [m, position, embed].

    Summed over steps it is the finite-time exponent of the direction.
    """
    tangent = _tangent(model, tokens)
    v = np.asarray(directions.array if isinstance(directions, NamedArray) else directions, np.float64)
    if v.shape[1:] != tangent.shape or len(v) == 0:
        raise UserError(f"directions must have the shape [m, {tangent.shape[0]}, {tangent.shape[1]}], got {v.shape}.")
    norms = np.linalg.norm(v.reshape(len(v), -1), axis=1)
    if not norms.all():
        raise UserError("a direction is zero, and has no exponent.")
    logs = []
    for n in range(tangent.steps):
        v = v / norms[:, None, None]
        v = np.asarray(tangent.forward(n, v), np.float64)
        norms = np.linalg.norm(v.reshape(len(v), -1), axis=1)
        logs.append(np.log(norms))
    return np.stack(logs)


def divergence(
    model: LmHeadModel | Reading, tokens: NamedArray, probes: int | None = None, seed: int = 0
) -> np.ndarray:
    """h tr(d F_n / d x) of each step, [steps]. Its sum, the integral of the divergence, is in the limit of short steps
    the sum of all exponents: the growth of volume.

    probes: None for the exact trace, one product for each dimension; a number for Hutchinson's estimate.
    """
    return _tangent(model, tokens).traces(probes, seed)


def _tangent(model, tokens) -> Tangent:
    reading = _reading(model)
    return Tangent(reading, sequence(reading, tokens))


def _reading(model: LmHeadModel | Reading) -> Reading:
    return model if isinstance(model, Reading) else read(model)


def _at_official_times(model) -> Reading:
    if not isinstance(model, NeuralOdeLMHeadModel):
        raise UserError("official_times is the official code's shift of layer-time by one step: give it a flow.")
    depth = model.config.depth
    if depth.solver != "euler" or depth.step_size != "uniform":
        raise UserError("official_times reproduces the official code, whose flow is Euler with step 1/L.")
    try:
        return read(model, endpoint="left")
    except UserError as error:
        raise UserError(f"official_times needs weights at t = 0, which this model does not have. {error}") from None
