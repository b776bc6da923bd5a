"""The language model around the flow: embed, prelude, flow, coda, norm, head."""

import dataclasses
from typing import Any

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

from qkvflow.axes import CONTROL, EMBED, POSITION
from qkvflow.blocks import Controlled, Inputs
from qkvflow.depth import DepthConfig, Solution
from qkvflow.errors import UserError
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.embeddings import Embeddings, init_head
from qkvflow.models.flow import Flow
from qkvflow.models.loss import next_token_loss
from qkvflow.time import grid
from qkvflow.weights import PerLayer, PerLayerConfig, TimeShift, refine_with_error


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

        return NeuralOdeTransformer(
            ordinary(config.prelude_layers, k_prelude),
            Flow(_build(config, ordinary=False, times=config.field_times, key=k_flow), **config.travel),
            ordinary(config.coda_layers, k_coda),
            config.block.norm(config.Embed),
        )

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        """norm(x(1))."""
        return self.solve(x, inputs, key=key).end

    def solve(self, x: NamedArray, inputs: Inputs, *, key=None, trajectory: bool = False) -> Solution:
        """What the flow gives, its end after coda and norm; with `trajectory` its states, and its end as it is."""
        k_prelude, k_flow, k_coda = maybe_rng_split(key, 3)
        if self.prelude is not None:
            x = self.prelude(x, inputs.within("prelude"), key=k_prelude)
        solution = self.flow.solve(x, inputs, key=k_flow, trajectory=trajectory)
        if trajectory:
            return solution
        x = solution.end
        if self.coda is not None:
            x = self.coda(x, inputs.within("coda"), key=k_coda)
        return dataclasses.replace(solution, end=inputs.see("norm", self.norm(x)))

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
        **inputs: Any,
    ) -> NamedArray:
        """Logits {..., position, vocab} of the next token, from tokens {..., position}.

        Args:
            attn_mask: causal by default. Differs from Levanter, where None lets every token see future tokens.
            key: needed in training mode if the model has dropout.
            inputs: further fields of `qkvflow.blocks.Inputs`: `pos_ids`, and `control`, {batch, control}, or
                {batch, position, control} to change along the sequence; None is zero control.
        """
        given = Inputs.of(attn_mask, **inputs)
        x = self.solve(input_ids, given, key=key).end
        return given.see("logits", hax.dot(x, self.get_lm_head(), axis=EMBED))

    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        **inputs: Any,
    ) -> NamedArray:
        """norm(x(1)): {..., position, embed}."""
        return self.solve(input_ids, Inputs.of(attn_mask, **inputs), key=key).end

    def trajectory(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        **inputs: Any,
    ) -> NamedArray:
        """The states of the flow after each of its steps: {layers, ..., position, embed}; the last is x(1)."""
        return self.solve(input_ids, Inputs.of(attn_mask, **inputs), key=key, trajectory=True).states

    def solve(self, input_ids: NamedArray, inputs: Inputs, *, key=None, trajectory: bool = False) -> Solution:
        """The basis of the methods above: the flow's solution, and its end after coda and norm."""
        if inputs.control is not None:
            _check_control(self.config, input_ids, inputs.control)
        length, longest = input_ids.axis_size(POSITION), self.config.max_seq_len
        if length > longest and inputs.pos_ids is None and self.embeddings.position_embeddings is not None:
            raise UserError(
                f"the text has {length} tokens, but this model has embeddings of {longest} positions"
                " (`model.max_seq_len`). Give at most that many tokens, or `pos_ids` within them."
            )
        k_embed, k_transformer = maybe_rng_split(key, 2)
        x = inputs.see("embed", self.embeddings(input_ids, pos_ids=inputs.pos_ids, key=k_embed))
        return self.transformer.solve(x, inputs, key=k_transformer, trajectory=trajectory)

    def compute_next_token_loss(self, example: LmExample, **options) -> jax.Array | NamedArray:
        """Levanter's name for the loss of `next_token_loss`, with its options."""
        return self.next_token_loss(example, **options)[0]

    def next_token_loss(
        self,
        example: LmExample,
        *,
        key=None,
        reduction: hax.ReductionFunction | None = hax.mean,
        reduction_axis: hax.AxisSelection | None = None,
        logsumexp_weight: float | None = None,
        loss_dtype: jnp.dtype | None = jnp.float32,
        logit_soft_cap: float | None = None,
    ) -> tuple[jax.Array | NamedArray, Solution]:
        """Levanter's loss under all inputs that the example carries (`Inputs.of_example`), and the flow's solution."""
        solution = self.solve(example.tokens, Inputs.of_example(example), key=key)
        loss = next_token_loss(
            self.Pos,
            self.Embed,
            self.Vocab,
            solution.end,
            self.get_lm_head(),
            example.tokens,
            loss_weight=example.loss_weight,
            reduction=reduction,
            reduction_axis=reduction_axis,
            logsumexp_weight=logsumexp_weight,
            dtype=loss_dtype,
            logit_soft_cap=logit_soft_cap,
        )
        return loss, solution

    def discretise(self, steps: int | None = None) -> "NeuralOdeLMHeadModel":
        """The ordinary model with the same weights at the times of a grid of `steps` steps (default: as trained).

        Its flow is a stack of `steps` ordinary blocks (`haliax.nn.Stacked`; methods with several stages have one block
        for each distinct stage time), trainable on its own: at the trained number of steps the same function, the
        reversible scheme of `adjoint: reversible` included.
        """
        if steps is None and self.config.depth.is_adaptive:
            raise UserError("An adaptive model has no fixed number of steps: give one, discretise(steps).")
        config = self.config.at_depth(self.config.depth.reading_steps if steps is None else steps)
        flow = self.transformer.flow.discretise(config.plan)
        return dataclasses.replace(self, transformer=dataclasses.replace(self.transformer, flow=flow), _config=config)

    def with_depth(self, depth: DepthConfig) -> "NeuralOdeLMHeadModel":
        """The same weights W(t) with another solver, number of steps or other depth settings."""
        config = dataclasses.replace(self.config, depth=depth)
        if isinstance(self.transformer.flow.weights, PerLayer):
            self.transformer.flow.weights.at(grid(config.plan.times))  # refuses times that it does not know
        return self.with_weights(self.transformer.flow.weights, config)

    def with_weights(self, weights: eqx.Module, config: NeuralOdeConfig) -> "NeuralOdeLMHeadModel":
        """The same model around another block W(t), with the configuration `config`."""
        flow = dataclasses.replace(self.transformer.flow, weights=weights, **config.travel)
        return dataclasses.replace(self, transformer=dataclasses.replace(self.transformer, flow=flow), _config=config)

    def with_grid_of(self, key: PRNGKeyArray) -> "NeuralOdeLMHeadModel":
        """The same model, which in training mode draws its grid in depth (a number of steps, jitter) as a call with
        `key` would; all else (dropout) it draws from the key that it is called with."""
        _, k_transformer = jax.random.split(key)
        _, k_flow, _ = jax.random.split(k_transformer, 3)
        flow = dataclasses.replace(self.transformer.flow, grid_key=k_flow)
        return dataclasses.replace(self, transformer=dataclasses.replace(self.transformer, flow=flow))

    def refined(self, dim: int) -> tuple["NeuralOdeLMHeadModel", float]:
        """The same model with basis weights of `dim` functions, and their error; see `qkvflow.weights.refine`."""
        weights, error = refine_with_error(self.transformer.flow.weights, dim)
        config = dataclasses.replace(self.config, weights=self.config.weights.refined(dim))
        return self.with_weights(weights, config), error

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


NeuralOdeConfig.model_class = NeuralOdeLMHeadModel


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
            "This model has no control (`model.control` is null), so it cannot use one. Train a model with"
            " `model.control: {dim: N}`, or leave the control out."
        )
    axes = {a.name: a.size for a in control.axes}
    if axes.pop(CONTROL, None) != config.control.dim:
        raise UserError(f"The control needs an axis `control` of size {config.control.dim}, got axes {control.axes}.")
    allowed = {a.name: a.size for a in tokens.axes}
    if any(allowed.get(name) != size for name, size in axes.items()):
        raise UserError(f"The other axes of the control must be axes of the tokens {tokens.axes}, got {control.axes}.")
