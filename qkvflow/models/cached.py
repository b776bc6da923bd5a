"""The language model token by token: the same blocks and plans, each evaluation of B with its own memory.

    x = embed(new tokens);  every evaluation of B reads its memory of earlier positions and adds the new ones

The weights are evaluated once, W(t) at all times of the grid, so that a token costs what it costs an ordinary model.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import EMBED, LAYERS, POSITION
from qkvflow.blocks import Inputs
from qkvflow.blocks.matrices import with_matrices
from qkvflow.blocks.memory import keys_of
from qkvflow.depth import FixedPlan, integrate_until_exit, integrate_with_memory
from qkvflow.errors import UserError
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.embeddings import Embeddings
from qkvflow.models.exits import Exit, ExitConfig, ExitMemory
from qkvflow.models.flow import Flow
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.models.shared_cache import EXACT, CacheSharing, SharedMemory, integrate_with_shared_memory
from qkvflow.named import map_named
from qkvflow.time import grid
from qkvflow.weights import evaluate

MOST_EVALUATIONS = 256  # of a field that are cached: each is compiled by itself, with keys and values of its own


class CachedFlow(eqx.Module):
    """A flow with evaluated weights: an ordinary block for each distinct time of its plan.

    Attributes:
        sharing: which of its evaluations keep keys and values.
    """

    blocks: tuple
    plan: FixedPlan = eqx.field(static=True)
    sharing: CacheSharing = eqx.field(static=True, default=EXACT)

    @staticmethod
    def of(flow: Flow, sharing: CacheSharing = EXACT, with_exits: bool = False) -> "CachedFlow":
        """Evaluates all weights of a flow.

        Args:
            with_exits: tokens may stop early, so fused projections are split: stopped tokens compute keys and values
                only.

        Raises:
            UserError: there are too many.
        """
        evaluations = flow.plan.evaluations or 0  # None where steps adapt, which is refused elsewhere
        if evaluations > MOST_EVALUATIONS:
            raise UserError(
                f"This flow has {evaluations:,} evaluations of its field, but at most {MOST_EVALUATIONS} can be cached:"
                " each is compiled separately and keeps its own keys and values. Use fewer steps. To generate text with"
                " as many, recompute it for each token: `qkvflow sample --use_cache false`."
            )
        times = flow.plan.times
        stacked = evaluate(flow.weights, grid(times))
        parted = with_exits or sharing != EXACT
        blocks = tuple(with_matrices(_row(stacked, k), parted=parted) for k in range(len(times)))
        return CachedFlow(blocks, flow.plan, sharing)

    def memory(self, Batch: Axis, length: int, dtype) -> tuple | SharedMemory:
        """An empty memory for `length` positions: one for each evaluation of B, if none share theirs."""
        evaluations = tuple(self.blocks[0].memory(Batch, length, dtype) for _ in range(self.plan.evaluations))
        return evaluations if self.sharing == EXACT else SharedMemory.of(evaluations, self.sharing)

    def extend(
        self, x: NamedArray, inputs: Inputs, memory: tuple | SharedMemory
    ) -> tuple[NamedArray, tuple | SharedMemory]:
        """x(1) at the positions of `inputs.window`, and the memory with them."""
        inputs = inputs.in_step(self.plan.field_step)
        if isinstance(memory, SharedMemory):
            return integrate_with_shared_memory(self.blocks, x, self.plan, memory, self.sharing, inputs)
        return integrate_with_memory(_field, self.blocks, x, self.plan, memory, args=inputs)


class CachedModel(eqx.Module):
    """A language model that continues sequences from its memory of them.

    Memory is a pytree: for prelude, flow and coda one memory for each evaluation of B.

    Attributes:
        exit: when a token stops integrating.
    """

    embeddings: Embeddings
    prelude: CachedFlow | None
    flow: CachedFlow
    coda: CachedFlow | None
    norm: eqx.Module
    head: NamedArray
    vocab_size: int = eqx.field(static=True)
    config: NeuralOdeConfig = eqx.field(static=True)
    exit: Exit | None = None

    @staticmethod
    def of(
        model: NeuralOdeLMHeadModel,
        exits: ExitConfig | None = None,
        sharing: CacheSharing = EXACT,
        exits_vary: bool = False,
    ) -> "CachedModel":
        """Evaluates all weights; `model` must be in inference mode.

        Args:
            exits: a threshold of 0 means no exits, unless `exits_vary`.
            exits_vary: texts may have other thresholds.

        Raises:
            UserError: the model has adaptive steps, or `exits` does not work with this model or with `sharing`.
        """
        sharing.check(with_exits=exits is not None)
        model = on_fixed_grid(model)
        some_exit = exits is not None and (exits.threshold > 0 or exits_vary)
        parts = model.transformer
        prelude, coda = (None if f is None else CachedFlow.of(f) for f in (parts.prelude, parts.coda))
        flow = CachedFlow.of(parts.flow, sharing, some_exit)
        # A tied head lies the other way round: turned once, it is not turned for each token.
        head = _in_whole_panels(model.get_lm_head().rearrange((EMBED, ...)))
        leaving = None
        if exits is not None:
            asked = Exit.of(exits, flow.plan.steps, coda is not None)  # refuses what cannot be, at a threshold of 0 too
            leaving = asked if some_exit else None
        modules = (model.embeddings, prelude, flow, coda, parts.norm, head)
        return CachedModel(*modules, model.Vocab.size, model.config, leaving)

    def memory(self, Batch: Axis, length: int) -> tuple:
        """An empty memory for `length` positions of each sequence."""
        dtype = self.embeddings.token_embeddings.weight.dtype
        memories = [() if flow is None else flow.memory(Batch, length, dtype) for flow in self._flows]
        if self.exit is not None:
            memories[1] = ExitMemory.empty(memories[1], Batch, self.flow.plan.steps)
        return tuple(memories)

    def extend(self, tokens: NamedArray, inputs: Inputs, memory: tuple) -> tuple[NamedArray, tuple]:
        """norm(x(1)) at the new positions, {batch, position, embed}, and the memory with them.

        Args:
            tokens: {batch, position}: those of the window.
            inputs: with a `window`; `pos_ids` are the places in it by default.
        """
        pos_ids = inputs.pos_ids
        if pos_ids is None:
            pos_ids = inputs.window.positions(tokens.resolve_axis(POSITION))
        # Positions that fill up a window may lie beyond the last one.
        inputs = dataclasses.replace(inputs, pos_ids=hax.minimum(pos_ids, self.config.max_seq_len - 1))
        x = self.embeddings(tokens, pos_ids=inputs.pos_ids)
        after = []
        for flow, part in zip(self._flows, memory, strict=True):
            if isinstance(part, ExitMemory):
                x, part = self._until_exit(x, inputs, part)
            elif flow is not None:
                x, part = flow.extend(x, inputs, part)
            after.append(part)
        return self.norm(x), tuple(after)

    def logits(self, x: NamedArray) -> NamedArray:
        """{..., vocab}, fp32, from what `extend` gives."""
        logits = hax.dot(x, self.head, axis=EMBED, preferred_element_type=jnp.float32)
        return logits[self.head.axes[1].name, : self.vocab_size]

    def _until_exit(self, x: NamedArray, inputs: Inputs, memory: ExitMemory) -> tuple[NamedArray, ExitMemory]:
        rule, plan, New = self.exit, self.flow.plan, x.resolve_axis(POSITION)
        assert rule is not None

        def leaves(k: int, going: NamedArray, before: NamedArray, after: NamedArray) -> NamedArray:
            return rule.leaves(k, going, before, after, plan.steps, lambda x: self.logits(self.norm(x)))

        x, kept, steps = integrate_until_exit(
            _remembering,
            _reading,
            self.flow.blocks,
            x,
            plan,
            memory.evaluations,
            inputs.window.real(New),
            leaves,
            min_steps=rule.least,
            args=inputs.in_step(plan.field_step),
        )
        spent = jnp.stack([hax.sum(steps, New).array.astype(jnp.int32), inputs.window.count.array], axis=1)
        return x, ExitMemory(kept, memory.spent + spent, memory.of)

    @property
    def _flows(self) -> tuple[CachedFlow | None, ...]:
        return self.prelude, self.flow, self.coda


def on_fixed_grid(model: NeuralOdeLMHeadModel) -> NeuralOdeLMHeadModel:
    """The model with a plan of fixed steps.

    Raises:
        UserError: its steps are adaptive.
    """
    depth = model.config.depth
    if depth.is_adaptive:
        raise UserError(
            "This model has adaptive steps (rtol, atol), so it cannot generate: step sizes depend on the whole text, so"
            " a new token changes the states of all earlier ones and nothing can be cached. Use a fixed grid:"
            " model.with_depth(model.config.depth.on_grid(steps=12)), in programs --steps 12."
        )
    return model.with_depth(depth.on_grid())


def _in_whole_panels(head: NamedArray) -> NamedArray:
    """The head with columns of zeros up to a multiple of 64. Kernels take the columns that are left over beside whole
    panels in another way when there are few rows, and a token must not depend on how many are computed with it."""
    Embed, Vocab = head.axes
    missing = -Vocab.size % 64
    return hax.named(jnp.pad(head.array, ((0, 0), (0, missing))), (Embed, Vocab.resize(Vocab.size + missing)))


def _row(stacked, k: int):
    return map_named(lambda a: a[LAYERS, k] if LAYERS in {axis.name for axis in a.axes} else a, stacked)


def _remembering(block, x: NamedArray, inputs: Inputs, memory):
    """The memory with the positions of x, and what their evaluation reads: keys after them, states before them."""
    after = block.extend(x, inputs, memory)[1]
    return after, keys_of(after, memory)


def _reading(block, x: NamedArray, inputs: Inputs, memory) -> NamedArray:
    """dx/dt of positions whose keys are in the memory already."""
    inputs = dataclasses.replace(inputs, window=dataclasses.replace(inputs.window, written=True))
    return block.extend(x, inputs, memory)[0]


def _field(block, x: NamedArray, inputs: Inputs, memory):
    return block.extend(x, inputs, memory)
