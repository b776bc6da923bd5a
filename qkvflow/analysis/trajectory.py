"""The path of the states through depth: how fast and whereto they move, what they would say, what they attend to."""

from dataclasses import dataclass
from functools import singledispatch

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel
from scipy import special

from qkvflow.analysis.parts import attention_of
from qkvflow.analysis.reading import Reading, read, sequence
from qkvflow.analysis.reading import trajectory as _states
from qkvflow.axes import EMBED, HEAD_SIZE, HEADS, KV_HEAD, POSITION, QKV
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.grouped_query import GroupedQueryAttention
from qkvflow.errors import UserError


@dataclass(frozen=True)
class Motion:
    """Of each token, with v_k = (x_{k+1} - x_k) / (t_{k+1} - t_k) = L Psi_k, the mean velocity in step k on the axis
    t in [0, 1]: of flows and ordinary layers on one scale, so that the speed integrates to the length of the path.

    Attributes:
        speed: ||v_k||, [steps, position].
        turning: cos(v_k, v_{k+1}), [steps - 1, position]: 1 goes straight on, 0 turns by a right angle.
        outward: cos(x_k, v_k), [steps, position]: the part of the motion that only makes x longer (or shorter,
            negative).
        displacement: ||x_k - x_0|| / ||x_0||, [steps + 1, position].
    """

    speed: np.ndarray
    turning: np.ndarray
    outward: np.ndarray
    displacement: np.ndarray


@dataclass(frozen=True)
class LogitLens:
    """What the model says if the flow ends early: the head (after coda and norm) on the states x_0, ..., x_L.

    Attributes:
        loss: of the next token, nats, [steps + 1, position - 1].
        top_tokens, top_probabilities: the most likely next tokens, [steps + 1, position, top].
        rank: how many tokens are more likely than the next one, [steps + 1, position - 1]; 0 is a right prediction.
        entropy: of the prediction, nats, [steps + 1, position]; log(vocabulary) at most.
        divergence: KL(p_L || p_n) of the model's own prediction from the one at x_n, nats, [steps + 1, position].
    """

    loss: np.ndarray
    top_tokens: np.ndarray
    top_probabilities: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray


def states(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """x_0, ..., x_L: float [steps + 1, position, embed]; `model.trajectory` with the start in front."""
    reading = _reading(model)
    return np.asarray(_states(reading, sequence(reading, tokens)).array)


def motion(model: LmHeadModel | Reading, tokens) -> Motion:
    """Speed, direction and displacement of the states: see `Motion`."""
    reading = _reading(model)
    x = states(reading, tokens).astype(np.float64)
    v = np.diff(x, axis=0) * reading.steps
    start = np.linalg.norm(x[0], axis=-1)
    return Motion(
        speed=np.linalg.norm(v, axis=-1),
        turning=_cosine(v[:-1], v[1:]),
        outward=_cosine(x[:-1], v),
        displacement=np.linalg.norm(x - x[0], axis=-1) / start,
    )


def logit_lens(model: LmHeadModel | Reading, tokens, top: int = 5) -> LogitLens:
    """Loss and most likely tokens along t: see `LogitLens`.

    Caveat: the head is trained on x(1) only. That early states read badly does not mean that they know nothing.
    """
    reading = _reading(model)
    tokens = sequence(reading, tokens)
    vocab = reading.model.Vocab.size
    if not 1 <= top <= vocab:
        raise UserError(f"top must lie in 1..{vocab}, the size of the vocabulary, got {top}.")
    return LogitLens(*(np.asarray(a) for a in _lens(reading, tokens, _states(reading, tokens), top)))


def attention(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """p_ij, what token i attends to token j, of each head at the beginning of each step: [steps, heads, i, j]."""
    reading = _reading(model)
    tokens = sequence(reading, tokens)
    return np.asarray(_attention(reading, _states(reading, tokens)))


def attention_entropy(model: LmHeadModel | Reading, tokens) -> np.ndarray:
    """-sum_j p_ij log p_ij in nats of the attention of each head: [steps, heads, position].

    At the beginning of each step (of its first stage). Token i sees i + 1 tokens, so log(i + 1) is the most.
    """
    reading = _reading(model)
    tokens = sequence(reading, tokens)
    return entropy_of(np.asarray(_attention(reading, _states(reading, tokens))))


@eqx.filter_jit
def _lens(reading: Reading, tokens: NamedArray, states: NamedArray, top: int):
    def log_probabilities(x):
        return jax.nn.log_softmax(reading.logits(hax.named(x, (POSITION, EMBED))).rearrange((POSITION, ...)).array)

    last = log_probabilities(states.array[-1])

    def at(x):
        log_p = log_probabilities(x)
        log_next = jnp.take_along_axis(log_p[:-1], tokens.array[1:, None], axis=-1)
        values, ids = jax.lax.top_k(log_p, top)
        rank = jnp.sum(log_p[:-1] > log_next, axis=-1)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        divergence = jnp.sum(jnp.exp(last) * (last - log_p), axis=-1)
        return -log_next[:, 0], ids, jnp.exp(values), rank, entropy, divergence

    return jax.lax.map(at, states.array)


@eqx.filter_jit
def _attention(reading: Reading, states: NamedArray):
    def at(inputs):
        k, x = inputs
        x = hax.named(x, (POSITION, EMBED))
        block, heard = reading.block(k), []
        listening = eqx.tree_at(attention_of, block, _with_ear(attention_of(block), heard))
        reading.run_block(listening, x)
        q, key = _queries_and_keys(attention_of(block), heard)
        scores = jnp.einsum("hid,hjd->hij", q, key) / jnp.sqrt(q.shape[-1])
        size = scores.shape[-1]
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((size, size), bool)), scores, -jnp.inf))

    return jax.lax.map(at, (jnp.arange(reading.steps), states.array[:-1]))


def entropy_of(p: np.ndarray) -> np.ndarray:
    """-sum_j p_ij log p_ij in nats, along the last axis."""
    return -np.sum(special.xlogy(p, p), axis=-1)


class _Ear(eqx.Module):
    """Stands for a module and notes what it returns, so that a block can be listened to while it runs."""

    inner: eqx.Module
    heard: list = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        result = self.inner(*args, **kwargs)
        self.heard.append(result)
        return result


@singledispatch
def _with_ear(attention, heard: list):
    raise UserError(f"the attention of {type(attention).__name__} cannot be listened to.")


@_with_ear.register
def _(attention: Gpt2Attention, heard):
    return eqx.tree_at(lambda a: a.c_attn, attention, _Ear(attention.c_attn, heard))


@_with_ear.register
def _(attention: GroupedQueryAttention, heard):
    return eqx.tree_at(lambda a: a.rotary, attention, _Ear(attention.rotary, heard))


def _queries_and_keys(attention, heard: list) -> tuple[jax.Array, jax.Array]:
    """[heads, position, head_size] each, from what was heard: q, k and v together, or rotated q and then rotated k."""
    if isinstance(attention, Gpt2Attention):
        q, k, _ = heard[0].unbind(QKV)
        return q.rearrange((HEADS, POSITION, HEAD_SIZE)).array, k.rearrange((HEADS, POSITION, HEAD_SIZE)).array
    q, k = heard
    q = q.rearrange((HEADS, POSITION, HEAD_SIZE)).array
    k = k.rearrange((KV_HEAD, POSITION, HEAD_SIZE)).array
    return q, jnp.repeat(k, q.shape[0] // k.shape[0], axis=0)


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Along the last axis; NaN where one of the two is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(a * b, axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def _reading(model: LmHeadModel | Reading) -> Reading:
    return model if isinstance(model, Reading) else read(model)
