"""Refuses settings that cannot work before any work: Levanter would fail late or obscurely."""

import itertools
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.checkpoint import CheckpointInterval
from levanter.layers.rotary import RotaryEmbeddingsConfig
from levanter.models.lm_model import LmConfig
from levanter.optim.model_averaging import EmaDecaySqrtConfig
from levanter.schedule import distinct_values
from levanter.trainer import TrainerConfig

from qkvflow.config import decode
from qkvflow.config.levanter_ranges import LEVANTER
from qkvflow.errors import UserError
from qkvflow.inside.levanter import settle_devices
from qkvflow.inside.rotary import check_rope
from qkvflow.models import NeuralOdeConfig
from qkvflow.ranges import check_ranges
from qkvflow.runs.adam import ScaledAdamConfig
from qkvflow.runs.config import TrainConfig
from qkvflow.units import in_bytes


def check_config(config: TrainConfig) -> None:
    """Checks that need no devices and no data."""
    trainer, model = config.trainer, config.model
    check_ranges(config, LEVANTER)
    for mapping in ("shared_mapping", "compute_mapping"):
        if "vocab" in getattr(trainer.mesh, mapping):
            raise UserError(
                f"`trainer.mesh.{mapping}` maps `vocab`: the loss would be silently wrong, because Levanter does not"
                " sum its normaliser over the parts of the vocabulary. To shard the embedding, map `vocab` in"
                " `trainer.mesh.param_mapping`"
            )
    if isinstance(trainer.model_averaging, EmaDecaySqrtConfig):
        raise UserError(
            "`trainer.model_averaging: {type: ema_decay_sqrt}` fails in Levanter's compiled step. Use {type: ema}"
        )
    if isinstance(model, NeuralOdeConfig):
        if trainer.quantization is not None:
            raise UserError(
                "`trainer.quantization` does not work with `type: neuralode`: its scales are kept for one use of each"
                " matrix, and a flow uses its own at every step. Leave it out"
            )
        model.depth.first_steps(trainer.num_train_steps)  # refuses stages without a step
    if isinstance(rope := getattr(model, "rope", None), RotaryEmbeddingsConfig):
        check_rope(rope)
    config.data.control_field(config.control_dim)
    if config.Pos.size < 2:
        raise UserError("`model.max_seq_len` is 1, but training needs at least 2 positions: a token, and the next one")
    length = config.train_seq_len
    if length is not None and length > model.max_seq_len:
        raise UserError(f"`train_seq_len` is {length}, but must be at most `model.max_seq_len`, {model.max_seq_len}")
    if isinstance(config.optimizer, ScaledAdamConfig):
        config.optimizer.tell_if_idle(getattr(model, "weights", None))
    _check_levanter_paths(trainer)
    _check_batches(trainer)
    for number, interval in enumerate(trainer.checkpointer.keep or []):
        decode(CheckpointInterval, interval, f"trainer.checkpointer.keep[{number}]")


def largest_batch(trainer: TrainerConfig) -> int:
    """Sequences of the largest batch of a training."""
    size = trainer.train_batch_size
    if isinstance(size, int):
        return size
    return max(step.value for step in size if step.start < max(1, trainer.num_train_steps))


def _check_batches(trainer: TrainerConfig) -> None:
    if isinstance(trainer.train_batch_size, int):
        return
    starts = [step.start for step in trainer.train_batch_size]
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise UserError(
            f"`trainer.train_batch_size` has sizes from steps {starts}: the first must start at 0, and each other one"
            " later than the one before it"
        )


def check_devices(trainer: TrainerConfig) -> None:
    """Checks the batch sizes against the device mesh and fills in what follows from it (in place).

    Must come after `jax.distributed` is initialised, since it asks for the devices.
    """
    if trainer.require_accelerator and jax.default_backend() == "cpu":
        raise UserError("`trainer.require_accelerator` is true, but JAX found no GPU or TPU")
    try:
        data_axis = trainer.data_axis_size
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"`trainer.mesh` does not fit the {jax.device_count()} devices: {error}") from None
    for size in [] if trainer.train_batch_size == -1 else distinct_values(trainer.train_batch_size):
        if size < 1 or size % data_axis:
            raise UserError(
                f"`trainer.train_batch_size` is {size}, but must be a positive multiple of {data_axis}, the number of"
                f" devices that share the batch ({jax.device_count()} devices in total)"
            )
    for name in ("per_device_parallelism", "per_device_eval_parallelism"):
        value = getattr(trainer, name)
        if value != -1 and value < 1:
            raise UserError(f"`trainer.{name}` must be at least 1, or -1 for all examples at once, but is {value}")
    try:
        settle_devices(trainer)
    except ValueError as error:
        raise UserError(f"trainer: {error}") from None


def check_memory(trainer: TrainerConfig, model: LmConfig, Pos: Axis, state_bytes: int, copies: int = 1) -> None:
    """Refuses what cannot fit whatever the compiler does: the training state, and one state x(t) per token.

    A training step needs several times as much. `qkvflow.describe --mesh` compiles it and knows.

    Args:
        state_bytes: parameters and optimizer state, of all devices together.
        copies: trainings that are to fit together.

    Raises:
        UserError: the devices together have less memory.
    """
    per_device = _memory_of(jax.local_devices()[0])
    if per_device is None:
        return
    present = per_device * (jax.process_count() if jax.default_backend() == "cpu" else jax.device_count())
    at_once = trainer.per_device_parallelism * trainer.data_axis_size
    if at_once < 0:  # a batch that grows is not divided
        at_once = largest_batch(trainer)
    states = at_once * Pos.size * model.Embed.size * jnp.dtype(trainer.mp.compute_dtype).itemsize
    if copies * (state_bytes + states) > present:
        together, each, fewer = "", "", ""
        if copies > 1:
            together, each, fewer = f" for {copies} trainings at once", ", each", "fewer at once, "
        raise UserError(
            f"there is not enough memory{together}: parameters and optimizer state take {in_bytes(state_bytes)}, and"
            f" the states of {at_once:,} sequences of {Pos.size:,} tokens at least {in_bytes(states)}{each}, but there"
            f" are {in_bytes(present)}. Use {fewer}a smaller `trainer.train_batch_size`, accumulate gradients over"
            " smaller parts (`trainer.per_device_parallelism`), or use a smaller model"
        )


def _memory_of(device: Any) -> int | None:
    """Bytes of memory of a device; of a CPU those of its machine, which its devices share. None if it does not say."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def model_shape(model: LmConfig, vocab: Axis) -> eqx.Module:
    """The model's shapes without its arrays; a `UserError` if the configuration cannot be built."""
    try:
        return eqx.filter_eval_shape(lambda key: model.build(vocab, key=key), key_shape())
    except (ValueError, AssertionError) as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UserError(f"the model cannot be built from `model`: {reason or _assertion_line(error)}") from error


def key_shape() -> jax.ShapeDtypeStruct:
    """The shape of a random key: a key itself would be an array on a device, which need not be here."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0))


def tree_bytes(tree: object) -> int:
    """Size of all arrays (or shapes of arrays) in a tree."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum(int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves if _is_plain(leaf.dtype))


def _is_plain(dtype: object) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended)  # typed random keys have no size in bytes


def _check_levanter_paths(trainer: TrainerConfig) -> None:
    """Refuses keys that would put a run's files outside its directory, where nothing would find them."""
    default = type(trainer.checkpointer)()
    for name in ("base_path", "temporary_base_path"):
        if getattr(trainer.checkpointer, name) != getattr(default, name):
            raise UserError(
                f"`trainer.checkpointer.{name}` cannot be set: checkpoints are stored in the run directory, which you"
                " set with --run_dir DIR and --trainer.id NAME"
            )
    if trainer.load_checkpoint_path is not None:
        raise UserError(
            "`trainer.load_checkpoint_path` cannot be set: a run resumes from its own newest checkpoint. To start from"
            " another run's state, use `trainer.initialize_from`"
        )
    if trainer.load_checkpoint is False:
        raise UserError(
            "`trainer.load_checkpoint: false` would overwrite the run's checkpoints. For a new run, use "
            "--trainer.id NAME"
        )
    if trainer.allow_nondivisible_batch_size:
        raise UserError(
            "`trainer.allow_nondivisible_batch_size` is not supported: the devices share the batch evenly. Leave it out"
        )
    if trainer.shutdown_at_exit is not False:
        raise UserError("`trainer.shutdown_at_exit` is not supported: shut the machine down after the program")


def _assertion_line(error: BaseException) -> str:
    """Where a bare `assert` failed, as its source line."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"it breaks the rule `{(frame.line or '').removeprefix('assert ')}`"
