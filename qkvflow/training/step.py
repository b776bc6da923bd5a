"""The training step: Levanter's, with our loss. Training runs it; `describe --mesh` compiles it from shapes."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for, round_axis_for_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from levanter.data.text import GrugLmExample, named_lm_example_from_grug
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import FilterTree
from optax import GradientTransformation

from qkvflow.axes import CONTROL
from qkvflow.data.control.sequences import ControlledExample
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.loss import counted, part_of
from qkvflow.models.metrics import penalised
from qkvflow.named import is_named
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import key_shape, largest_batch
from qkvflow.training.finite import FiniteTrainer

InStep = Callable[[LmHeadModel, jax.Array | None], LmHeadModel]


def make_trainer(
    config: TrainConfig, trainer: TrainerConfig, optimizer: GradientTransformation, in_step: InStep | None = None
) -> FiniteTrainer:
    """Levanter's trainer of the mean next-token loss, which looks for numbers that are not finite; the current tracker
    becomes its own.

    Args:
        trainer: as training uses it (`config.trainer`, completed by `check_devices`).
        in_step: the model as the loss sees it, from the model and the key of the step (`Start.in_step`).
    """

    def loss(model: LmHeadModel, example: LmExample, *, key=None, step_key=None, whole=None):
        def of_batch(value):
            return value if whole is None else part_of(value, example.loss_weight, whole)

        if in_step is not None:
            model = in_step(model, key)
        if not isinstance(model, NeuralOdeLMHeadModel):
            weights, some = counted(example.loss_weight)
            example = dataclasses.replace(example, loss_weight=weights)
            value = model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)
            return of_batch(value * some)
        model = at_stage(model, finite.stage)
        if step_key is not None:
            model = model.with_grid_of(step_key)
        value, solution = model.next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)
        return penalised(model, of_batch(value), solution, grows=len(config.model.stages) > 1)

    finite = FiniteTrainer(trainer, optimizer, loss, add_default_hooks=False)
    finite.skips = config.max_skipped_steps > 0
    return finite


def at_stage(model: LmHeadModel, stage: int) -> LmHeadModel:
    """The model as a stage of its training reads it: on that stage's number of steps, if its depth grows."""
    if not isinstance(model, NeuralOdeLMHeadModel) or len(model.config.stages) == 1:
        return model
    return model.with_depth(model.config.stages[stage].depth)


def vocabulary(config: TrainConfig, tokens: int, trainer: TrainerConfig) -> Axis:
    """The model's vocabulary axis: as large as the tokenizer, or as `vocab_size` says if it is larger."""
    if config.vocab_size is None:
        with trainer.use_device_mesh():
            return round_axis_for_partitioning(Axis("vocab", tokens), trainer.parameter_axis_mapping)
    if config.vocab_size < tokens:
        raise UserError(f"`vocab_size` is {config.vocab_size}, but the tokenizer has {tokens} tokens")
    return Axis("vocab", config.vocab_size)


def state_shape(trainer: FiniteTrainer, model: eqx.Module, trainable: FilterTree = True) -> TrainerState:
    """The state of a training of a model given by its shapes, as shapes that know their sharding.

    Parameters and optimizer are divided by the trainer's parameter mapping; the rest is whole on each device.
    """

    def init(model, key):
        return TrainerState.init(
            trainer.optimizer,
            model,
            key=key,
            is_trainable=trainable,
            mp=trainer.mp,
            quantization=trainer.config.quantization,
            model_averaging=trainer.config.model_averaging,
        )

    shape = eqx.filter_eval_shape(init, model, key_shape())
    return _sharded(shape, trainer, trainer.parameter_axis_mapping)


def batch_shape(config: TrainConfig, trainer: FiniteTrainer) -> LmExample:
    """The largest training batch as Levanter's loader gives it for running text, as shapes that know their sharding."""

    Pos = config.Pos

    def example() -> LmExample:
        blocked = config.data.block_cross_document_attention
        plain = GrugLmExample.causal(jnp.zeros(Pos.size, jnp.int32), eos_id=0, block_cross_document_attention=blocked)
        named = named_lm_example_from_grug(plain, Pos)
        dim = config.control_dim
        if dim is None or config.data.control_key is None:
            return named
        control = hax.zeros((Pos, Axis(CONTROL, dim)))
        return ControlledExample(named.tokens, named.loss_weight, named.attn_mask, control)

    Batch = trainer.config.batch_axis_at_step(0).resize(largest_batch(trainer.config))

    def stacked(leaf):
        axes = (Batch, *leaf.axes) if isinstance(leaf, NamedArray) else ()
        array = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not isinstance(array, jax.ShapeDtypeStruct):
            return leaf
        struct = jax.ShapeDtypeStruct((Batch.size, *array.shape), array.dtype)
        return NamedArray(struct, tuple(a.name for a in axes)) if axes else struct  # pyright: ignore

    shape = jax.tree.map(stacked, eqx.filter_eval_shape(example), is_leaf=is_named)
    return _sharded(shape, trainer, trainer.compute_axis_mapping)


def _sharded(tree, trainer: FiniteTrainer, mapping: ResourceMapping):
    mesh = trainer.device_mesh

    def place(leaf):
        array = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not isinstance(array, jax.ShapeDtypeStruct):
            return leaf
        spec = pspec_for(leaf, mapping) if isinstance(leaf, NamedArray) else PartitionSpec()
        struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
        return NamedArray(struct, leaf.axis_names) if isinstance(leaf, NamedArray) else struct  # pyright: ignore

    return jax.tree.map(place, tree, is_leaf=is_named)
