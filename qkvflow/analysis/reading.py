"""Any language model as steps in depth, x_{k+1} = x_k + Psi_k(x_k): the one form that all dynamical analysis reads.

For a flow Psi_k is the increment of its solver (for Euler h B(x; W(t_k))); for an ordinary model it is what layer k
adds to the residual stream. Prelude, coda, norm and head stand around the steps.
"""

import abc
import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import Attention, AttentionBackend, AttentionMask
from levanter.models import gpt2
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.analysis.matrices import layers_of
from qkvflow.analysis.parts import merged
from qkvflow.axes import EMBED, LAYERS, POSITION
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.grouped_query import GroupedQueryAttention
from qkvflow.blocks.state_space import SsmMixer
from qkvflow.depth import Plan
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.time import GridPoint
from qkvflow.weights import at

_MASK = AttentionMask.causal()


class Reading(eqx.Module):
    """A model read step by step on one sequence; in inference mode, float32 at least, causal.

    model: in a form that can be differentiated forward (attention without a custom backward pass).
    """

    model: LmHeadModel

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """How many steps there are."""

    @property
    @abc.abstractmethod
    def step(self) -> float:
        """The length h of a step: Psi = h times the field. 1 for layers that are added as they are."""

    @abc.abstractmethod
    def start(self, tokens: NamedArray) -> NamedArray:
        """x_0 {position, embed}, after the prelude, from tokens {position}."""

    @abc.abstractmethod
    def increment(self, k, x: NamedArray) -> NamedArray:
        """Psi_k(x), with the axes of x. `k` may be traced."""

    @abc.abstractmethod
    def field(self, k, x: NamedArray) -> NamedArray:
        """F(x) with the weights that step k begins with: what Psi_k / h is for short steps. `k` may be traced."""

    @property
    def differentiates_forward(self) -> bool:
        """Whether the block has Jacobian-vector products; that of a recurrence has a backward pass by hand instead."""
        return not any(isinstance(m, SsmMixer) for m in jax.tree.leaves(self.model, is_leaf=_is_mixer))

    @abc.abstractmethod
    def block(self, k) -> eqx.Module:
        """The block whose attention step k begins with. `k` may be traced."""

    @abc.abstractmethod
    def run_block(self, block: eqx.Module, k, x: NamedArray) -> NamedArray:
        """What a block as given by `block(k)` makes of x."""

    @abc.abstractmethod
    def activations(self, x: NamedArray) -> NamedArray:
        """What the head reads if x is the end of the flow: after coda and norm."""

    @property
    def ends(self) -> tuple[float, ...]:
        """Layer-time before the first step and after each: 0, 1/L, ..., 1."""
        return tuple(k / self.steps for k in range(self.steps + 1))

    def logits(self, x: NamedArray) -> NamedArray:
        """{position, vocab}: what the model would say if x were the end of the flow."""
        return hax.dot(self.activations(x), self.model.get_lm_head(), axis=EMBED)


class FlowReading(Reading):
    """Of a qkvflow model with per-layer weights on a fixed grid (`Flow.discretise`)."""

    @property
    def steps(self) -> int:
        return self._plan.steps

    @property
    def step(self) -> float:
        return self._plan.step

    def start(self, tokens: NamedArray) -> NamedArray:
        x = self.model.embeddings(tokens)
        prelude = self.model.transformer.prelude
        return (x if prelude is None else prelude(x, _MASK)).rearrange((POSITION, EMBED))

    def increment(self, k, x: NamedArray) -> NamedArray:
        return self.model.transformer.flow.increment(k, x, _MASK).rearrange(x.axes)

    def field(self, k, x: NamedArray) -> NamedArray:
        return self.run_block(self.block(k), k, x).rearrange(x.axes)

    def block(self, k) -> eqx.Module:
        flow = self.model.transformer.flow
        first = jnp.asarray([row[self._plan.stage_slots[0]] for row in self._plan.time_rows])
        return at(flow.weights, GridPoint(self._plan.times, first[k]))

    def run_block(self, block, k, x: NamedArray) -> NamedArray:
        return block(x, _MASK)

    def activations(self, x: NamedArray) -> NamedArray:
        transformer = self.model.transformer
        return transformer.norm(x if transformer.coda is None else transformer.coda(x, _MASK))

    @property
    def _plan(self) -> Plan:
        return self.model.config.plan


class LayersReading(Reading):
    """Of one of Levanter's models: step k is layer k."""

    stacked: eqx.Module  # the blocks, leaves {layers, ...}

    @property
    def steps(self) -> int:
        return self.model.config.num_layers

    @property
    def step(self) -> float:
        return 1.0

    def start(self, tokens: NamedArray) -> NamedArray:
        positions = hax.arange(tokens.resolve_axis(POSITION), dtype=jnp.int32)
        options = {"key": None, "pos_ids": positions} if self._is_gpt2 else {}
        return self.model.embeddings.embed(tokens, **options).rearrange((POSITION, EMBED))

    def increment(self, k, x: NamedArray) -> NamedArray:
        return self.field(k, x)

    def field(self, k, x: NamedArray) -> NamedArray:
        return self.run_block(self.block(k), k, x).rearrange(x.axes) - x

    def block(self, k) -> eqx.Module:
        return jax.tree.map(
            lambda a: a[LAYERS, k] if isinstance(a, NamedArray) else a,
            self.stacked,
            is_leaf=lambda a: isinstance(a, NamedArray),
        )

    def run_block(self, block, k, x: NamedArray) -> NamedArray:
        return block(x, _MASK, k, key=None) if self._is_gpt2 else block(x, _MASK)

    def activations(self, x: NamedArray) -> NamedArray:
        return self.model.transformer.ln_f(x) if self._is_gpt2 else self.model.transformer.norm(x)

    @property
    def _is_gpt2(self) -> bool:
        return isinstance(self.model, gpt2.Gpt2LMHeadModel)


def read(model: LmHeadModel, steps: int | None = None, *, endpoint: str | None = None) -> Reading:
    """The model as steps in depth.

    Args:
        steps: of a flow, another number than it was trained with.
        endpoint: of a flow read by Euler, another end of its steps than in training.

    A flow with adaptive or random steps is read on the fixed grid of its solver, one with the reversible scheme by the
    plain steps of its solver: the same differential equation.

    Errors: `UserError` for a model of an unknown kind, or steps that it has no weights for.
    """
    model = jax.tree.map(_at_least_float32, inference_mode(merged(model), True))
    model = jax.tree.map(_plain, model, is_leaf=_is_attention)
    if not isinstance(model, NeuralOdeLMHeadModel):
        stacked = layers_of(model)
        if steps is not None and steps != model.config.num_layers:
            raise UserError(
                f"an ordinary model of {model.config.num_layers} layers has no other depth: leave out steps."
            )
        return LayersReading(model, stacked)
    changes = {} if endpoint is None else {"endpoint": endpoint}
    depth = model.config.depth.on_grid(steps, adjoint="checkpoint", coupling=None, **changes)
    return FlowReading(model.with_depth(depth).discretise())


def sequence(reading: Reading, tokens) -> NamedArray:
    """Tokens of one sequence as int32 {position}: from a NamedArray (with a batch of one, at most), an array, a list.

    Errors: `UserError` for no tokens, more than the context, more than one sequence, tokens outside the vocabulary.
    """
    array = np.asarray(tokens.array if isinstance(tokens, NamedArray) else tokens)
    if isinstance(tokens, NamedArray) and POSITION not in {a.name for a in tokens.axes}:
        raise UserError(f"tokens need an axis `position`, got axes {tokens.axes}.")
    if array.ndim > 1 and array.size == array.shape[-1]:
        array = array.reshape(-1)
    if array.ndim != 1:
        raise UserError(f"one sequence of tokens at a time, got an array of shape {array.shape}.")
    if array.size == 0:
        raise UserError("there are no tokens: the text is empty. Give at least one token.")
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"tokens must be whole numbers, got {array.dtype}.")
    context = reading.model.config.max_seq_len
    if array.size > context:
        raise UserError(
            f"the text has {array.size} tokens, but the model's context is {context}: shorten it, or cut the tokens"
            f" to the last {context}."
        )
    vocab = reading.model.Vocab.size
    if array.min() < 0 or array.max() >= vocab:
        raise UserError(f"tokens must lie in 0..{vocab - 1}, got {array.min()}..{array.max()}.")
    return hax.named(jnp.asarray(array, jnp.int32), POSITION)


@eqx.filter_jit
def trajectory(reading: Reading, tokens: NamedArray) -> NamedArray:
    """x_0, ..., x_L: {layers = L+1, position, embed}."""
    x0 = reading.start(tokens)

    def step(x, k):
        x = x + reading.increment(k, hax.named(x, x0.axes)).array
        return x, x

    _, later = jax.lax.scan(step, x0.array, jnp.arange(reading.steps))
    return hax.named(jnp.concatenate([x0.array[None], later]), (hax.Axis(LAYERS, reading.steps + 1), *x0.axes))


def _at_least_float32(leaf):
    if eqx.is_inexact_array(leaf):
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return leaf


def _is_mixer(module) -> bool:
    return isinstance(module, SsmMixer)


def _is_attention(module) -> bool:
    return isinstance(module, (Gpt2Attention, GroupedQueryAttention, gpt2.Gpt2Attention, Attention))


def _plain(module):
    """The same attention by the kernel that can be differentiated forward (flash attention cannot)."""
    if isinstance(module, (Gpt2Attention, GroupedQueryAttention)):
        return dataclasses.replace(module, backend=AttentionBackend.VANILLA, flash_block_size=None)
    if isinstance(module, (gpt2.Gpt2Attention, Attention)):
        config = dataclasses.replace(module.config, attn_backend=AttentionBackend.VANILLA)
        return dataclasses.replace(module, config=config)
    return module
