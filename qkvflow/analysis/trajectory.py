"""The path of the states through depth: how fast and where they move, what they predict, what they attend to.

The measures are those of `qkvflow.lens`, here for one sequence as NumPy arrays, for figures and the report.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import numpy as np
from levanter.models.lm_model import LmHeadModel

from qkvflow import lens
from qkvflow.analysis.reading import Reading, read, sequence
from qkvflow.analysis.reading import trajectory as _states
from qkvflow.axes import HEADS, KEY_POSITION, LAYERS, POSITION
from qkvflow.lens.paths import cosine


@dataclass(frozen=True)
class Motion:
    """Motion of each token, with v_k = (x_{k+1} - x_k) / (t_{k+1} - t_k) = L Psi_k, the mean velocity in step k with
    respect to t in [0, 1]. Flows and ordinary layers have the same scale: the integral of the speed is the path length.

    Attributes:
        speed: ||v_k||, [steps, position].
        turning: cos(v_k, v_{k+1}), [steps - 1, position]: 1 is straight on, 0 a right-angle turn.
        outward: cos(x_k, v_k), [steps, position]: the part of the motion that only lengthens x (or shortens it, if
            negative).
        displacement: ||x_k - x_0|| / ||x_0||, [steps + 1, position].
    """

    speed: np.ndarray
    turning: np.ndarray
    outward: np.ndarray
    displacement: np.ndarray


@dataclass(frozen=True)
class LogitLens:
    """The prediction if the flow ended early: the head (after coda and norm) applied to the states x_0, ..., x_L.

    Attributes:
        loss: of the next token, nats, [steps + 1, position - 1].
        top_tokens, top_probabilities: the most likely next tokens, [steps + 1, position, top].
        rank: number of tokens more likely than the next one, [steps + 1, position - 1]; 0 is a correct prediction.
        entropy: of the prediction, nats, [steps + 1, position]; at most log(vocabulary).
        divergence: KL(p_L || p_n) of the model's own prediction from the one at x_n, nats, [steps + 1, position].
    """

    loss: np.ndarray
    top_tokens: np.ndarray
    top_probabilities: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray


def states(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """x_0, ..., x_L: float [steps + 1, position, embed]; `model.trajectory` with the initial state prepended."""
    reading = _reading(model)
    return np.asarray(_states(reading, sequence(reading, tokens)).array)


def motion(model: LmHeadModel | Reading, tokens) -> Motion:
    """Speed, direction and displacement of the states: see `Motion`."""
    reading = _reading(model)
    path = _states(reading, sequence(reading, tokens))
    x = np.asarray(path.array, np.float64)
    return Motion(
        speed=np.asarray(lens.speed(path).array),
        turning=np.asarray(lens.turning(path).array),
        outward=cosine(x[:-1], np.diff(x, axis=0)),
        displacement=np.linalg.norm(x - x[0], axis=-1) / np.linalg.norm(x[0], axis=-1),
    )


def logit_lens(model: LmHeadModel | Reading, tokens, top: int = 5) -> LogitLens:
    """Loss and most likely tokens along t: see `LogitLens`.

    Caveat: the head is trained on x(1) only. Poor predictions from early states do not mean that they hold nothing.
    """
    reading = _reading(model)
    tokens, control = sequence(reading, tokens), reading.inputs.control
    found = eqx.filter_jit(lens.logit_lens)(reading.model, tokens, top, control=control)
    seen = (found.loss, found.top_tokens, found.top_probabilities, found.rank, found.entropy, found.kl)
    return LogitLens(*(np.asarray(a.array) for a in seen))


def attention(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """p_ij, the attention of token i to token j, for each head at the beginning of each step: [steps, heads, i, j]."""
    reading = _reading(model)
    tokens, control = sequence(reading, tokens), reading.inputs.control
    place = "attn.pattern" if reading.plan.evaluations == reading.steps else "0.attn.pattern"
    _, cache = eqx.filter_jit(lens.run_with_cache)(reading.model, tokens, f"[0-9]*.{place}", control=control)
    return np.asarray(cache.stack(place).rearrange((LAYERS, HEADS, POSITION, KEY_POSITION)).array)


def attention_entropy(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """-sum_j p_ij log p_ij of the attention p of each head, in nats: [steps, heads, position].

    At the beginning of each step (of its first stage). Token i sees i + 1 tokens, so the maximum is log(i + 1).
    """
    return entropy_of(attention(model, tokens))


def entropy_of(maps: np.ndarray) -> np.ndarray:
    """`attention_entropy` from the maps that `attention` returns."""
    return np.asarray(lens.attention_entropy(hax.named(maps, (LAYERS, HEADS, POSITION, KEY_POSITION))).array)


def _reading(model: LmHeadModel | Reading) -> Reading:
    return model if isinstance(model, Reading) else read(model)
