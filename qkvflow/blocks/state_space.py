"""A state-space mixer: each embed channel is a diagonal linear system along positions, y = C h + D x.

    A = -softplus(A_raw),  Delta = softplus(delta_raw),  h_k = exp(Delta A) h_{k-1} + (exp(Delta A) - 1)/A B x_k
    selective: Delta_k = softplus(delta_raw + W_up W_down x_k),  B_k = W_B x_k,  C_k = W_C x_k     (Mamba)

Initial values: A = -1, -2, ..., -state (S4D-Real), Delta log-uniform in [0.001, 0.1], D = 1, B = 1 and C ~ N(0, 1).
Sources: Gu et al., S4D (arXiv 2206.11893), section 4; Gu & Dao, Mamba (arXiv 2312.00752), algorithms 1 and 2, section
3.6. Differs from Mamba: A = -softplus instead of -exp, so that a factor of time on the parameter acts on every rate
(log A is 0 for A = -1); B is held exactly; no convolution of width 4, no gate and no projections around the system, as
in the fork zaphrode/qkvflow, whose SSM this is, but that the fork's attention had no causal mask.

Recurrences are computed in fp32 (fp64 if x is), whatever the compute dtype.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split
from levanter.layers.attention import AttentionMask

from qkvflow.axes import BATCH, DELTA_RANK, EMBED, POSITION, STATE
from qkvflow.blocks import recurrence
from qkvflow.blocks.chunked import chunked
from qkvflow.blocks.inputs import Inputs

DELTA_RANGE = (1e-3, 1e-1)


class StateSpace(eqx.Module):
    """The parameters that do not depend on the input: A_raw {state, embed}, delta_raw, D {embed}; not selective: B, C
    as A_raw."""

    A_raw: NamedArray
    delta_raw: NamedArray
    B: NamedArray | None
    C: NamedArray | None
    D: NamedArray

    @staticmethod
    def init(Embed: Axis, State: Axis, *, selective: bool, key) -> "StateSpace":
        k_delta, k_c = jax.random.split(key)
        rates = hax.arange(State, start=1, dtype=jnp.float32).broadcast_axis(Embed).rearrange((State, Embed))
        low, high = jnp.log(jnp.asarray(DELTA_RANGE))
        delta = hax.exp(hax.random.uniform(k_delta, Embed, minval=low, maxval=high))
        inputs = None if selective else hax.ones((State, Embed))
        outputs = None if selective else hax.random.normal(k_c, (State, Embed))
        return StateSpace(_inverse_softplus(rates), _inverse_softplus(delta), inputs, outputs, hax.ones(Embed))


class Selection(eqx.Module):
    """Delta, B and C as linear functions of the input: {embed} -> {embed} by way of {delta_rank}, {state}, {state}."""

    delta_down: hnn.Linear
    delta_up: hnn.Linear
    B: hnn.Linear
    C: hnn.Linear

    @staticmethod
    def init(Embed: Axis, State: Axis, *, key) -> "Selection":
        k_down, k_up, k_b, k_c = jax.random.split(key, 4)
        Rank = Axis(DELTA_RANK, delta_rank(Embed.size))

        def linear(In: Axis, Out: Axis, key) -> hnn.Linear:
            return hnn.Linear.init(In, Out, key=key, use_bias=False, out_first=False)

        up = linear(Rank, Embed, k_up)
        bound = Rank.size**-0.5
        up = eqx.tree_at(lambda m: m.weight, up, hax.random.uniform(k_up, (Rank, Embed), minval=-bound, maxval=bound))
        return Selection(linear(Embed, Rank, k_down), up, linear(Embed, State, k_b), linear(Embed, State, k_c))


class SsmMixer(eqx.Module):
    """{..., position, embed} -> {..., position, embed}, causal: y_k depends on x_j for j <= k only."""

    space: StateSpace
    selection: Selection | None

    @staticmethod
    def init(Embed: Axis, State: Axis, *, selective: bool, key) -> "SsmMixer":
        k_space, k_selection = maybe_rng_split(key, 2)
        space = StateSpace.init(Embed, State, selective=selective, key=k_space)
        return SsmMixer(space, Selection.init(Embed, State, key=k_selection) if selective else None)

    def __call__(self, x: NamedArray, mask: AttentionMask | NamedArray | None) -> NamedArray:
        """In chunks of positions. The state is reset where the segment ids of `mask` change, so that documents packed
        in one sequence do not see each other; the rest of the mask is ignored (an SSM is always causal)."""
        return self._over_positions(x, mask, fast=True)

    def extend(self, x: NamedArray, inputs: Inputs, state: NamedArray | None) -> tuple[NamedArray, NamedArray | None]:
        """The same, continued from `state` {batch, state, embed}, and the state after it; positions of x that are not
        real in `inputs.window` leave the state alone. In a window on trial the states after all positions, {batch,
        position, state, embed}."""
        if state is None:
            return self(x, inputs.mask), None
        New, Embed = x.resolve_axis(POSITION), x.resolve_axis(EMBED)
        batch = (x.resolve_axis(BATCH),)
        system, real = self._system(x), inputs.window.real(New)
        raw = _flat(state, *(a.name for a in self.space.A_raw.axes))
        values = _flat(x, POSITION, EMBED).astype(system[1].dtype)
        trial = inputs.window.trial
        raw, y = recurrence.sequential(raw, *system, values, real=_flat(real, POSITION), every=trial)
        axes = (New, *self.space.A_raw.axes) if trial else self.space.A_raw.axes
        return self._output(_unflat(y, batch, (New, Embed)), x), _unflat(raw, batch, axes)

    def sequential(self, x: NamedArray, mask: AttentionMask | NamedArray | None) -> NamedArray:
        """The same, one position after another."""
        return self._over_positions(x, mask, fast=False)

    def initial_state(self, *batch: Axis) -> NamedArray:
        """The state before the first position: zeros {batch, state, embed}, fp32 (fp64 if the parameters are)."""
        dtype = jnp.promote_types(self.space.A_raw.dtype, jnp.float32)
        return hax.zeros((*batch, *self.space.A_raw.axes), dtype=dtype)

    def _over_positions(self, x: NamedArray, mask, *, fast: bool) -> NamedArray:
        Pos, Embed = x.resolve_axis(POSITION), x.resolve_axis(EMBED)
        batch = tuple(a for a in x.axes if a.name not in (POSITION, EMBED))
        system = self._system(x)
        start = _flat(segment_starts(mask, Pos).broadcast_axis(batch), POSITION)
        inputs = _flat(x, POSITION, EMBED).astype(system[1].dtype)
        if fast:
            y = chunked(*system, inputs, start)
        else:
            state = jnp.zeros((len(inputs), *system[1].shape), inputs.dtype)
            y = recurrence.sequential(state, *system, inputs, start)[1]
        return self._output(_unflat(y, batch, (Pos, Embed)), x)

    def _system(self, x: NamedArray):
        """Delta, A, B, C as plain arrays in fp32; if selective with the axes batch and position in front."""
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        space = self.space
        A = -jax.nn.softplus(space.A_raw.array.astype(dtype))
        if self.selection is None:
            delta = jax.nn.softplus(space.delta_raw.array.astype(dtype))
            return delta, A, space.B.array.astype(dtype), space.C.array.astype(dtype)
        shift = self.selection.delta_up(self.selection.delta_down(x)).astype(dtype)
        delta = hnn.softplus(shift + space.delta_raw.astype(dtype))
        B, C = (_flat(w(x), POSITION, STATE).astype(dtype) for w in (self.selection.B, self.selection.C))
        return _flat(delta, POSITION, EMBED), A, B, C

    def _output(self, y: NamedArray, x: NamedArray) -> NamedArray:
        return (y + x * self.space.D).astype(x.dtype).rearrange(x.axes)


def delta_rank(embed: int) -> int:
    """The rank of the input's effect on Delta: a sixteenth of the width, as in Mamba."""
    return -(-embed // 16)


def segment_starts(mask: AttentionMask | NamedArray | None, Pos: Axis) -> NamedArray:
    """{..., position} bool: whether this position belongs to another segment than the one before it."""
    if not isinstance(mask, AttentionMask) or mask.segment_ids is None:
        return hax.zeros(Pos, dtype=jnp.bool_)
    ids = mask.segment_ids[0].rearrange((..., POSITION))
    changed = ids.array[..., 1:] != ids.array[..., :-1]
    return hax.named(jnp.concatenate([jnp.zeros_like(ids.array[..., :1], dtype=bool), changed], axis=-1), ids.axes)


def _inverse_softplus(y: NamedArray) -> NamedArray:
    return y + hax.log(-hax.expm1(-y))


def _flat(x: NamedArray, *last: str) -> jax.Array:
    """The array with all other axes merged into one in front."""
    array = x.rearrange((..., *last)).array
    return array.reshape(-1, *array.shape[array.ndim - len(last) :])


def _unflat(array: jax.Array, batch: tuple[Axis, ...], last: tuple[Axis, ...]) -> NamedArray:
    axes = (*batch, *last)
    return hax.named(array.reshape([a.size for a in axes]), axes)
