"""The path of the states through depth: how fast they move, how they turn, how the tokens cluster. In float64.

States are x_0, ..., x_L at t = 0, 1/L, ..., 1: {layers = L+1, ..., position, embed}, as returned by `lens.states`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.axes import EMBED, HEADS, KEY_POSITION, LAYERS, POSITION
from qkvflow.errors import UserError
from qkvflow.lens.run import run_with_cache

OTHER_LAYERS = "other_layers"


def states(model: LmHeadModel, tokens: NamedArray, **inputs: Any) -> NamedArray:
    """x_0, ..., x_L of the flow: {layers, ..., position, embed}. inputs: as in `lens.run_with_cache`."""
    return run_with_cache(model, tokens, "state.*", **inputs)[1].stack("state")


def speed(states: NamedArray) -> NamedArray:
    """||v_k||, v_k = L (x_{k+1} - x_k), the mean velocity in step k with respect to t: {layers = L, ..., position}."""
    x = _array(states)
    return _named(np.linalg.norm(np.diff(x, axis=0), axis=-1) * (len(x) - 1), states)


def turning(states: NamedArray) -> NamedArray:
    """cos(v_k, v_{k+1}): {layers = L-1, ..., position}. 1 is straight on; NaN where a state does not move."""
    v = np.diff(_array(states), axis=0)
    return _named(cosine(v[:-1], v[1:]), states)


def curvature(states: NamedArray) -> NamedArray:
    """1/R of the circle through x_k, x_{k+1}, x_{k+2}: {layers = L-1, ..., position} (Menger's curvature).

    2 sin(angle between v_k and v_{k+1}) / ||x_{k+2} - x_k||: 0 on a line, exact on a circle; in units of 1/||x||.
    """
    x = _array(states)
    v = np.diff(x, axis=0)
    chord = np.linalg.norm(x[2:] - x[:-2], axis=-1)
    sine = np.sqrt(np.maximum(0.0, 1.0 - cosine(v[:-1], v[1:]) ** 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return _named(2.0 * sine / chord, states)


def cosine_similarity(states: NamedArray) -> NamedArray:
    """cos(x_k, x_l) of each token at all pairs of layers: {layers, other_layers, ..., position}."""
    x = _directions(_array(states))
    return _named(np.einsum("k...e,l...e->kl...", x, x), states, (LAYERS, OTHER_LAYERS))


def effective_rank(states: NamedArray) -> NamedArray:
    """exp(-sum_i p_i log p_i), p_i = s_i / sum s, of the matrix of the tokens' states {position, embed}: {layers, ...}.

    1 if all tokens point in one direction, at most min(position, embed). Not centred.
    Source: Roy and Vetterli, The effective rank (EUSIPCO 2007).
    """
    s = np.linalg.svd(_array(states), compute_uv=False)
    p = s / s.sum(axis=-1, keepdims=True)
    return NamedArray(np.exp(-np.sum(p * _log(p), axis=-1)), _names(states)[:-2])


class Clustering(NamedTuple):
    """
    Attributes:
        similarity: mean of cos(x_i, x_j) over all pairs of tokens i < j, {layers, ...}: 1 if all are one cluster.
        clusters: {layers, ...}: number of clusters if tokens with cos >= `closeness` belong together, also through
            other tokens; int.
    """

    similarity: NamedArray
    clusters: NamedArray


def clustering(states: NamedArray, closeness: float = 0.99) -> Clustering:
    """How far the tokens of a sequence have clustered: see `Clustering`. The norm of a state is ignored.

    Source: Geshkovski et al., The emergence of clusters in self-attention dynamics (arXiv 2305.05465), and A
    mathematical perspective on transformers (arXiv 2312.10794).

    Raises:
        UserError: a single token.
    """
    x = _array(states)
    count = x.shape[-2]
    if count < 2:
        raise UserError("clusters need at least two tokens, but there is only one: give a longer text.")
    directions = _directions(x)
    similar = directions @ np.swapaxes(directions, -1, -2)
    upper = np.triu_indices(count, 1)
    reached = (similar >= closeness) | np.eye(count, dtype=bool)
    for _ in range(count.bit_length()):  # doubles the length of the paths that join tokens
        reached = (reached.astype(np.float32) @ reached.astype(np.float32)) > 0
    clusters = np.rint(np.sum(1.0 / reached.sum(axis=-1), axis=-1)).astype(np.int32)
    names = _names(states)[:-2]
    return Clustering(NamedArray(similar[..., upper[0], upper[1]].mean(axis=-1), names), NamedArray(clusters, names))


def attention_entropy(pattern: NamedArray) -> NamedArray:
    """-sum_j p_ij log p_ij, nats, of attention patterns {..., heads, position, key_position}, such as
    `cache.stack("attn.pattern")`: {..., heads, position}. Token i sees i + 1 tokens, so the maximum is log(i + 1)."""
    names = (*_others(pattern, HEADS, POSITION, KEY_POSITION), HEADS, POSITION)
    p = _ordered(pattern, (*names, KEY_POSITION))
    return NamedArray(-np.sum(p * _log(p), axis=-1), names)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Along the last axis; NaN where one of the two vectors is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(a * b, axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def _directions(x: np.ndarray) -> np.ndarray:
    """Of length one along the last axis; NaN for a zero vector."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _array(states: NamedArray) -> np.ndarray:
    return _ordered(states, _names(states))


def _names(states: NamedArray) -> tuple[str, ...]:
    return (LAYERS, *_others(states, LAYERS, POSITION, EMBED), POSITION, EMBED)


def _others(array: NamedArray, *names: str) -> tuple[str, ...]:
    return tuple(name for name in array.axis_names if name not in names)


def _ordered(array: NamedArray, names: Sequence[str]) -> np.ndarray:
    """As a NumPy array: JAX would round float64."""
    values = array.array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array.array
    return np.asarray(values, np.float64).transpose([array.axis_names.index(name) for name in names])


def _named(array: np.ndarray, states: NamedArray, first: tuple[str, ...] = (LAYERS,)) -> NamedArray:
    """A named array with a number for each layer and token."""
    return NamedArray(array, (*first, *_names(states)[1:-1]))


def _log(p: np.ndarray) -> np.ndarray:
    """0 where p is 0, for p log p."""
    return np.log(np.where(p > 0, p, 1.0))
