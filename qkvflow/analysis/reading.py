"""Any language model as steps in depth, x_{k+1} = x_k + Psi_k(x_k): the form that all analyses use.

Psi_k is the increment of the solver (for Euler h B(x; W(t_k))); for an ordinary model, whose step is h = 1, it is what
layer k adds to the residual stream. Prelude, coda, norm and head are outside the steps.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.axes import CONTROL, EMBED, LAYERS, POSITION
from qkvflow.blocks import Inputs
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.grouped_query import GroupedQueryAttention
from qkvflow.blocks.state_space import SsmMixer
from qkvflow.depth import FixedPlan
from qkvflow.errors import UserError
from qkvflow.lens.paths import states
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.levanter_twin import enter
from qkvflow.time import GridPoint
from qkvflow.weights import at


class Reading(eqx.Module):
    """A model as steps in depth on one sequence: inference mode, at least float32, causal.

    Attributes:
        model: with per-layer weights on a fixed grid (`Flow.discretise`), in a form that supports forward-mode
            differentiation (attention without a custom backward pass).
        inputs: inputs of its blocks, the same at every step.
    """

    model: NeuralOdeLMHeadModel
    inputs: Inputs

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.plan.steps

    @property
    def step(self) -> float:
        """The step length h of the state: Psi = h times the field. 1 for ordinary residual layers."""
        return self.plan.step

    @property
    def plan(self) -> FixedPlan:
        return self.model.config.plan

    @property
    def ends(self) -> tuple[float, ...]:
        """Layer-time before the first step and after each: 0, 1/L, ..., 1; for ordinary layers too."""
        return tuple(k / self.steps for k in range(self.steps + 1))

    @property
    def times(self) -> tuple[float, ...]:
        """Layer-time of the weights at the beginning of each step: the coordinate at which measurements are plotted."""
        return tuple(self.plan.times[row] for row in self._first_rows)

    @property
    def differentiates_forward(self) -> bool:
        """Whether the block has Jacobian-vector products; a recurrence only has a hand-written backward pass."""
        return not any(isinstance(m, SsmMixer) for m in jax.tree.leaves(self.model, is_leaf=_is_mixer))

    def increment(self, k, x: NamedArray) -> NamedArray:
        """Psi_k(x), with the axes of x. `k` may be traced."""
        return self.model.transformer.flow.increment(k, x, self.inputs).rearrange(x.axes)

    def field(self, k, x: NamedArray) -> NamedArray:
        """F(x) with the weights at the beginning of step k: Psi_k / h for short steps. `k` may be traced."""
        return self.run_block(self.block(k), x).rearrange(x.axes)

    def block(self, k) -> eqx.Module:
        """The block whose attention comes first in step k. `k` may be traced."""
        return at(self.model.transformer.flow.weights, GridPoint(self.plan.times, jnp.asarray(self._first_rows)[k]))

    def run_block(self, block: eqx.Module, x: NamedArray) -> NamedArray:
        """The output for x of a block as returned by `block(k)`."""
        return block(x, self.inputs.in_step(self.plan.field_step))

    def activations(self, x: NamedArray) -> NamedArray:
        """The head's input if x is the end of the flow: after coda and norm."""
        transformer = self.model.transformer
        return transformer.norm(x if transformer.coda is None else transformer.coda(x, self.inputs))

    def logits(self, x: NamedArray) -> NamedArray:
        """{position, vocab}: the model's prediction if x were the end of the flow."""
        return hax.dot(self.activations(x), self.model.get_lm_head(), axis=EMBED)

    @property
    def _first_rows(self) -> list[int]:
        grid = self.plan.grid
        return [row[grid.stage_slots[0]] for row in grid.time_rows]


def read(
    model: LmHeadModel, steps: int | None = None, *, endpoint: str | None = None, control: NamedArray | None = None
) -> Reading:
    """The model as steps in depth.

    Args:
        steps: for a flow, a number other than in training.
        endpoint: for an Euler flow, an end of its steps other than in training.
        control: {control} or {position, control}; None is zero control.

    Flows with adaptive or random steps are evaluated on the fixed grid of their solver, flows with the reversible
    scheme by the plain steps of their solver: the differential equation is the same.

    Raises:
        UserError: a model of an unknown kind, non-finite weights, a number of steps without weights, a
            control that does not fit.
    """
    check_finite(model)
    ours = jax.tree.map(_at_least_float32, inference_mode(enter(model), True))
    ours = jax.tree.map(_plain, ours, is_leaf=_is_attention)
    if control is not None:
        dim = None if ours.config.control is None else ours.config.control.dim
        if dim is None or control.axis_size(CONTROL) != dim:
            raise UserError(
                f"the control has {control.axis_size(CONTROL)} components, but the model takes"
                f" {'none' if dim is None else dim} (model.control)."
            )
    changes = {} if endpoint is None else {"endpoint": endpoint}
    depth = ours.config.depth.on_grid(steps, adjoint="checkpoint", coupling=None, **changes)
    return Reading(ours.with_depth(depth).discretise(), Inputs.of(control=control))


def check_finite(model: eqx.Module) -> None:
    """Raises:
    UserError: if an array holds non-finite numbers, with its name: such a model cannot be analysed.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if eqx.is_inexact_array(leaf) and not isinstance(leaf, jax.core.Tracer) and not bool(jnp.isfinite(leaf).all()):
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".array")
            raise UserError(
                f"the weights are not finite: {name} holds NaN or infinity, so there are no spectra, exponents or"
                " trajectories. Training diverged: use an earlier checkpoint with --checkpoint_step N."
            )


def sequence(reading: Reading, tokens) -> NamedArray:
    """Tokens of one sequence as int32 {position}: from a NamedArray (with a batch of at most one), an array or a list.

    Raises:
        UserError: no tokens, more than the context, more than one sequence, tokens outside the vocabulary.
    """
    array = np.asarray(tokens.array if isinstance(tokens, NamedArray) else tokens)
    if isinstance(tokens, NamedArray) and POSITION not in {a.name for a in tokens.axes}:
        raise UserError(f"tokens need an axis `position`, got axes {tokens.axes}.")
    if array.ndim > 1 and array.size == array.shape[-1]:
        array = array.reshape(-1)
    if array.ndim != 1:
        raise UserError(f"tokens must be one sequence, got an array of shape {array.shape}.")
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
    return states(reading.model, tokens, control=reading.inputs.control).rearrange((LAYERS, POSITION, EMBED))


def _at_least_float32(leaf):
    if eqx.is_inexact_array(leaf):
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return leaf


def _is_mixer(module) -> bool:
    return isinstance(module, SsmMixer)


def _is_attention(module) -> bool:
    return isinstance(module, (Gpt2Attention, GroupedQueryAttention))


def _plain(module):
    """The same attention with the kernel that supports forward-mode differentiation (flash attention does not)."""
    if not _is_attention(module):
        return module
    return dataclasses.replace(module, backend=AttentionBackend.VANILLA, flash_block_size=None)


def position_in(name: str, position: int, count: int) -> int:
    """A position in 0..count-1; negative ones count from the end.

    Raises:
        UserError: there is none such.
    """
    if not -count <= position < count:
        raise UserError(f"{name} must lie in {-count}..{count - 1} for {count} tokens, got {position}.")
    return position % count
