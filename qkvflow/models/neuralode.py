"""The language model around the flow: embed, prelude, flow, coda, norm, head."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split
from haliax.nn.scan import Stacked
from jaxtyping import PRNGKeyArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.models.loss import maybe_fused_next_token_loss

from qkvflow.axes import CONTROL, EMBED
from qkvflow.blocks import Controlled
from qkvflow.depth import DepthConfig, Statistics
from qkvflow.errors import UserError
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.embeddings import Embeddings, init_head
from qkvflow.models.flow import Flow
from qkvflow.time import grid
from qkvflow.weights import PerLayer, PerLayerConfig, TimeShift


class NeuralOdeTransformer(eqx.Module):
    """prelude (ordinary layers), flow, coda (ordinary layers), norm: {..., position, embed} -> the same axes."""

    prelude: Flow | None
    flow: Flow
    coda: Flow | None
    norm: hnn.LayerNorm | hnn.RmsNorm

    @staticmethod
    def init(config: NeuralOdeConfig, *, key) -> "NeuralOdeTransformer":
        k_prelude, k_flow, k_coda = jax.random.split(key, 3)

        def ordinary(layers: int, key) -> Flow | None:
            if layers == 0:
                return None
            plan = config.ordinary_plan(layers)
            return Flow(_build(config, ordinary=True, times=plan.times, key=key), plan)

        plan = config.plan
        return NeuralOdeTransformer(
            ordinary(config.prelude_layers, k_prelude),
            Flow(_build(config, ordinary=False, times=plan.times, key=k_flow), plan, config.training_plans),
            ordinary(config.coda_layers, k_coda),
            config.block.norm(config.Embed),
        )

    def __call__(
        self,
        x: NamedArray,
        mask,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        control: NamedArray | None = None,
        trajectory: bool = False,
    ) -> NamedArray:
        """norm(x(1)), or with `trajectory` the states of the flow."""
        return self.solve(x, mask, key=key, pos_ids=pos_ids, control=control, trajectory=trajectory)[0]

    def solve(
        self,
        x: NamedArray,
        mask,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        control: NamedArray | None = None,
        trajectory: bool = False,
    ) -> tuple[NamedArray, Statistics | None]:
        """What calling gives, and what the flow cost: None on a fixed grid."""
        k_prelude, k_flow, k_coda = maybe_rng_split(key, 3)
        if self.prelude is not None:
            x = self.prelude(x, mask, key=k_prelude, pos_ids=pos_ids)
        options = {"pos_ids": pos_ids, "control": control, "trajectory": trajectory}
        x, statistics = self.flow.solve(x, mask, key=k_flow, **options)
        if trajectory:
            return x[1], statistics
        if self.coda is not None:
            x = self.coda(x, mask, key=k_coda, pos_ids=pos_ids)
        return self.norm(x), statistics

    @property
    def blocks(self) -> Stacked:
        """The ordinary blocks of a discretised flow."""
        return self.flow.blocks


class NeuralOdeLMHeadModel(LmHeadModel[NeuralOdeConfig]):
    """A continuous-depth language model; a Levanter `LmHeadModel`."""

    embeddings: Embeddings
    transformer: NeuralOdeTransformer
    lm_head: hnn.Linear | None
    _config: NeuralOdeConfig = eqx.field(static=True)

    @classmethod
    def init(cls, Vocab: Axis, config: NeuralOdeConfig, *, key: PRNGKeyArray) -> "NeuralOdeLMHeadModel":
        k_embed, k_transformer, k_head = jax.random.split(key, 3)
        return cls(
            Embeddings.init(Vocab, config, key=k_embed),
            NeuralOdeTransformer.init(config, key=k_transformer),
            init_head(Vocab, config, key=k_head),
            config,
        )

    @property
    def config(self) -> NeuralOdeConfig:
        return self._config

    @property
    def Vocab(self) -> Axis:
        return self.embeddings.token_embeddings.Vocab

    def __call__(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        control: NamedArray | None = None,
    ) -> NamedArray:
        """Logits {..., position, vocab} of the next token, from tokens {..., position}.

        attn_mask: causal if not given. Differs from Levanter, where None lets every token see the future.
        key: needed in training mode if the model has dropout.
        control: {batch, control}, or {batch, position, control} to change along the sequence; None is zero control.
        """
        x = self.activations(input_ids, attn_mask, key=key, pos_ids=pos_ids, control=control)
        return hax.dot(x, self.get_lm_head(), axis=EMBED)

    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        control: NamedArray | None = None,
    ) -> NamedArray:
        """norm(x(1)): {..., position, embed}."""
        return self._run(input_ids, attn_mask, key=key, pos_ids=pos_ids, control=control)[0]

    def next_token_loss_and_statistics(
        self, example: LmExample, *, key=None, logsumexp_weight: float | None = None
    ) -> tuple[NamedArray, Statistics | None]:
        """`compute_next_token_loss`, averaged, and what the solve cost: None on a fixed grid."""
        x, statistics = self._run(example.tokens, example.attn_mask, key=key, pos_ids=None, control=None)
        loss = maybe_fused_next_token_loss(
            self.Pos,
            self.Embed,
            self.Vocab,
            x,
            self.get_lm_head(),
            example.tokens,
            loss_weight=example.loss_weight,
            logsumexp_weight=logsumexp_weight,
            dtype=jnp.float32,
        )
        return loss, statistics

    def trajectory(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        control: NamedArray | None = None,
    ) -> NamedArray:
        """The states of the flow after each of its steps: {layers, ..., position, embed}; the last is x(1)."""
        return self._run(input_ids, attn_mask, key=key, pos_ids=pos_ids, control=control, trajectory=True)[0]

    def compute_next_token_loss(
        self,
        example: LmExample,
        *,
        key=None,
        reduction: hax.ReductionFunction | None = hax.mean,
        reduction_axis: hax.AxisSelection | None = None,
        logsumexp_weight: float | None = None,
        loss_dtype: jnp.dtype | None = jnp.float32,
        logit_soft_cap: float | None = None,
    ) -> jax.Array | NamedArray:
        """Levanter's loss, under the example's `control` if it carries one (`qkvflow.data.control.sequences`)."""
        x = self.activations(example.tokens, example.attn_mask, key=key, control=getattr(example, "control", None))
        return maybe_fused_next_token_loss(
            self.Pos,
            self.Embed,
            self.Vocab,
            x,
            self.get_lm_head(),
            example.tokens,
            loss_weight=example.loss_weight,
            reduction=reduction,
            reduction_axis=reduction_axis,
            logsumexp_weight=logsumexp_weight,
            dtype=loss_dtype,
            logit_soft_cap=logit_soft_cap,
        )

    def discretise(self, steps: int | None = None) -> "NeuralOdeLMHeadModel":
        """The ordinary model with the same weights at the times of a grid of `steps` steps (default: as trained).

        Its flow is a stack of `steps` ordinary blocks (`haliax.nn.Stacked`; methods with several stages have one block
        for each distinct stage time), trainable on its own: at the trained number of steps the same function, the
        reversible scheme of `adjoint: reversible` included.
        """
        if steps is None and self.config.depth.is_adaptive:
            raise UserError("An adaptive model has no number of steps of its own: say how many, discretise(steps).")
        config = self.config.at_depth(self.config.depth.reading_steps if steps is None else steps)
        flow = self.transformer.flow.discretise(config.plan)
        return dataclasses.replace(self, transformer=dataclasses.replace(self.transformer, flow=flow), _config=config)

    def with_depth(self, depth: DepthConfig) -> "NeuralOdeLMHeadModel":
        """The same weights W(t), travelled in another way: another solver, another number of steps."""
        config = dataclasses.replace(self.config, depth=depth)
        plan = config.plan
        if isinstance(self.transformer.flow.weights, PerLayer):
            self.transformer.flow.weights.at(grid(plan.times))  # refuses times that it does not know
        flow = dataclasses.replace(self.transformer.flow, plan=plan, training_plans=config.training_plans)
        return dataclasses.replace(self, transformer=dataclasses.replace(self.transformer, flow=flow), _config=config)

    def get_lm_head(self) -> NamedArray:
        return self.embeddings.token_embeddings.weight if self.lm_head is None else self.lm_head.weight

    def resize_vocab(self, new_size: int, key: PRNGKeyArray | None = None) -> "NeuralOdeLMHeadModel":
        k_embed, k_head = maybe_rng_split(key, 2)
        tokens = self.embeddings.token_embeddings.resize_embeddings(new_size, key=k_embed)
        head = self.lm_head
        if head is not None:
            weight = hax.tree_util.resize_axis(head.weight, self.Vocab, new_size, key=k_head)
            head = dataclasses.replace(head, weight=weight, Out=self.Vocab.resize(new_size))
        embeddings = dataclasses.replace(self.embeddings, token_embeddings=tokens)
        return dataclasses.replace(self, embeddings=embeddings, lm_head=head)

    def _run(self, input_ids, attn_mask, *, key, pos_ids, control, trajectory: bool = False):
        if control is not None:
            _check_control(self.config, input_ids, control)
        k_embed, k_transformer = maybe_rng_split(key, 2)
        mask = AttentionMask.causal() if attn_mask is None else attn_mask
        x = self.embeddings(input_ids, pos_ids=pos_ids, key=k_embed)
        # Positions are placed once: by the table of the embeddings, or else by the blocks.
        in_blocks = pos_ids if self.embeddings.position_embeddings is None else None
        options = {"pos_ids": in_blocks, "control": control, "trajectory": trajectory}
        return self.transformer.solve(x, mask, key=k_transformer, **options)


def _build(config: NeuralOdeConfig, *, ordinary: bool, times: tuple[float, ...], key):
    """The time-dependent block of the flow, or of the ordinary layers around it."""
    if ordinary:
        return PerLayerConfig().build(lambda *, key: config.ordinary_block.init(config.Embed, key=key), times, key=key)

    def init_block(*, key):
        return config.block.init(config.Embed, key=key)

    control = config.control
    if control is None:
        return config.weights.build(init_block, times, key=key)
    k_weights, k_control, k_shift = jax.random.split(key, 3)
    if isinstance(config.weights, PerLayerConfig):

        def init_controlled(*, key):
            k_block, k_control = jax.random.split(key)
            return Controlled.init(init_block(key=k_block), config.Embed, control.dim, control.alpha, key=k_control)

        return config.weights.build(init_controlled, times, key=k_weights)
    block = config.weights.build(init_block, times, key=k_weights)
    controlled = Controlled.init(block, config.Embed, control.dim, control.alpha, key=k_control)
    return dataclasses.replace(controlled, shift=TimeShift.init(config.Embed, key=k_shift))


def _check_control(config: NeuralOdeConfig, tokens: NamedArray, control: NamedArray) -> None:
    if config.control is None:
        raise UserError(
            "This model has no control (`model.control` is null), so it cannot be given one. Train a model with"
            " `model.control: {dim: N}`, or leave the control out."
        )
    axes = {a.name: a.size for a in control.axes}
    if axes.pop(CONTROL, None) != config.control.dim:
        raise UserError(f"The control needs an axis `control` of size {config.control.dim}, got axes {control.axes}.")
    allowed = {a.name: a.size for a in tokens.axes}
    if any(allowed.get(name) != size for name, size in axes.items()):
        raise UserError(f"The other axes of the control must be axes of the tokens {tokens.axes}, got {control.axes}.")
