"""What the page shows about one text in one model: sensitivity, logit lens, motion, attention.

A few of these numbers along t are also computed for the text with shuffled tokens and for untrained models.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from qkvflow.analysis import lyapunov, trajectory
from qkvflow.analysis.opening import EncodedText
from qkvflow.analysis.page.numbers import Data, Step, rounded
from qkvflow.analysis.reading import Reading
from qkvflow.errors import UserError

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TOP = 5


def describe_text(text: EncodedText) -> Data:
    """The part that is the same for all checkpoints of a run."""
    return {
        "text": text.text,
        "labels": list(text.labels),
        "ids": [int(i) for i in text.ids],
    }


def output_positions(length: int, count: int) -> list[int]:
    """`count` positions of a text, spread over its later part and always including the last one."""
    return sorted({length - 1 - (length * i) // (count + 1) for i in range(count)})


def text_data(reading: Reading, ids: np.ndarray, outputs: Sequence[int], k: int, attention: bool, step: Step) -> Data:
    """All data about one text in one model.

    Args:
        outputs: positions whose sensitivity to each token is computed.
        k: number of exponents of the whole sequence.
        attention: whether the page has room for the attention maps.
    """
    scores = []
    for position in outputs:
        scores.append(np.cumsum(lyapunov.token_exponents(reading, ids, position), axis=0).max(axis=-1))
        step()
    lens = trajectory.logit_lens(reading, ids, top=min(_TOP, reading.model.Vocab.size))
    motion = trajectory.motion(reading, ids)
    step()
    data: Data = {
        **_grid(reading),
        "outputs": list(outputs),
        "scores": rounded(scores),
        "lens": {
            "loss": rounded(lens.loss),
            "top": lens.top_tokens.tolist(),
            "p": rounded(lens.top_probabilities, 3),
            "rank": lens.rank.tolist(),
            "entropy": rounded(lens.entropy),
            "kl": rounded(np.maximum(lens.divergence, 0.0)),
        },
        "motion": {f.name: rounded(getattr(motion, f.name)) for f in fields(motion)},
    }
    try:
        maps = trajectory.attention(reading, ids)
    except UserError as error:
        data["missing"] = str(error)
    else:
        data["entropy"] = rounded(trajectory.entropy_of(maps))
        data["places"] = _places(maps)
        if attention:
            data["attention"] = [[encoded(head) for head in step_maps] for step_maps in maps]
        else:
            data["missing"] = "left out to limit the size of the page: use shorter or fewer texts, or fewer runs"
    data["exponents"] = _growth(reading, ids, k)
    step()
    return data


def null_data(reading: Reading, ids: np.ndarray, k: int, step: Step) -> Data:
    """A few of the same numbers along t, for the null cases: shuffled text or untrained models."""
    lens = trajectory.logit_lens(reading, ids, top=1)
    motion = trajectory.motion(reading, ids)
    scores = np.cumsum(lyapunov.token_exponents(reading, ids), axis=0).max(axis=-1)
    data: Data = {
        **_grid(reading),
        "loss": rounded(lens.loss.mean(axis=-1)) if len(ids) > 1 else [],
        "right": rounded((lens.rank == 0).mean(axis=-1)) if len(ids) > 1 else [],
        "motion": {f.name: rounded(np.median(getattr(motion, f.name), axis=-1)) for f in fields(motion)},
        "scores": rounded(scores[-1]),
        "exponents": _growth(reading, ids, k),
    }
    try:
        maps = trajectory.attention(reading, ids)
        data |= {"entropy": rounded(_shares(trajectory.entropy_of(maps)).mean(axis=-1)), "places": _places(maps)}
    except UserError:
        pass
    step()
    return data


def encoded(attention: np.ndarray) -> str:
    """The lower triangle of [i, j] row by row, one character per number: sqrt(p) quantised to 64 levels."""
    rows, columns = np.tril_indices(len(attention))
    steps = np.rint(63 * np.sqrt(np.clip(attention[rows, columns], 0.0, 1.0))).astype(int)
    return "".join(_ALPHABET[i] for i in steps)


def uniform_places(length: int) -> Data:
    """`places` for uniform attention."""
    seen = np.arange(2, length + 1)
    return {name: float(np.mean(1.0 / seen)) for name in ("first", "previous", "itself")} if length > 1 else {}


def _grid(reading: Reading) -> Data:
    """Its layer-times, after and in the steps: not those of another checkpoint of the run if its depth grows."""
    return {"ends": rounded(reading.ends, 4), "times": rounded(reading.times, 4)}


def _places(maps: np.ndarray) -> Data:
    """Mean attention of all tokens except the first to the first, the previous and the same token, [steps, heads]."""
    length = maps.shape[-1]
    if length < 2:
        return {}
    i = np.arange(1, length)
    places = {"first": maps[..., 1:, 0], "previous": maps[..., i, i - 1], "itself": maps[..., i, i]}
    return {name: rounded(values.mean(axis=-1)) for name, values in places.items()}


def _shares(entropies: np.ndarray) -> np.ndarray:
    """Entropies as fractions of their maximum, averaged over tokens: [steps, heads]."""
    length = entropies.shape[-1]
    if length < 2:
        return np.full(entropies.shape[:-1], np.nan)
    return (entropies[..., 1:] / np.log(np.arange(2, length + 1))).mean(axis=-1)


def _growth(reading: Reading, ids: np.ndarray, k: int) -> list:
    k = min(k, len(ids) * reading.model.Embed.size)
    return rounded(np.cumsum(lyapunov.step_exponents(reading, ids, k), axis=0))
