"""Compiles the training step for the devices of this process from shapes, and determines its cost."""

import re
import resource
import time
import warnings
from typing import Any

import jax
import levanter.tracker
from haliax import NamedArray
from jax.stages import Compiled, Lowered
from levanter.models.lm_model import LmConfig
from levanter.tracker import NoopTracker
from levanter.trainer import TrainerConfig

from qkvflow.errors import UserError
from qkvflow.meshes.collectives import collectives
from qkvflow.meshes.hlo import Program
from qkvflow.meshes.kernels import attention_kernel
from qkvflow.meshes.report import MeshReport
from qkvflow.meshes.target import Target
from qkvflow.meshes.whole import LARGE, whole_arguments, whole_temporaries
from qkvflow.meshes.work import matrix_flops, memory_traffic
from qkvflow.models import NeuralOdeConfig
from qkvflow.named import is_named
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import check_config, check_devices, largest_batch, model_shape, tree_bytes
from qkvflow.training.mesh import check_mesh, complete_mesh
from qkvflow.training.optimizer import working_optimizer
from qkvflow.training.start import Start
from qkvflow.training.step import batch_shape, make_trainer, state_shape, vocabulary

# Memory is determined before code generation; optimising the code would only cost time.
_QUICK = {"xla_backend_optimization_level": 0}


def compile_ahead(
    config: TrainConfig,
    tokens: int,
    large: int = LARGE,
    start: Start | None = None,
    target: Target | None = None,
    machine: list[int] | None = None,
) -> MeshReport:
    """The report for `config` on all devices of this process; nothing is allocated.

    If the depth grows during training, it is that of the deepest stage, whose step needs the most memory and work.

    Args:
        tokens: size of the tokenizer's vocabulary; the model's vocabulary follows as in training.
        large: bytes above which an unsharded array is reported.
        start: the start of the model if it is not randomly initialised: which part a fine-tune trains.
        target: the machine that the devices represent.
        machine: for each of its devices, the machine that contains it.

    Raises:
        UserError: every error that training would raise, before anything is compiled.
    """
    check_config(config)
    trainer_config = config.trainer
    if target is None:
        _check_kernel(config.model)
    check_devices(trainer_config)
    Vocab = vocabulary(config, tokens, trainer_config)
    optimizer = working_optimizer(config, start)
    with trainer_config.use_device_mesh():
        model = model_shape(config.model, Vocab) if start is None else start.shape(Vocab)
    trainable = True if start is None else start.trainable(model)
    trainer_config = complete_mesh(trainer_config, model)
    check_mesh(trainer_config, model, config.Pos)
    began = time.monotonic()
    with (
        levanter.tracker.current_tracker(NoopTracker()),
        make_trainer(config, trainer_config, optimizer, start and start.in_step) as trainer,
    ):
        state, batch = state_shape(trainer, model, trainable), batch_shape(config, trainer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.stage, staged = _deepest(config.model)
            lowered = trainer.lower(state, batch)
        devices = trainer.device_mesh.devices.reshape(-1)
        compiled = compiled_or_needed(lowered)
    seconds = time.monotonic() - began
    common = dict(
        mesh=_mesh(trainer_config),
        devices=len(devices),
        parameters=_on_device(state.model),
        optimizer=_on_device(state.opt_state),
        all_parameters=tree_bytes(state.model),
        all_optimizer=tree_bytes(state.opt_state),
        given=_on_device(state) + _on_device(batch),
        whole_arguments=whole_arguments(state, large),
        large=large,
        rematerialised=0,
        compile_seconds=seconds,
        compile_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        target=None if target is None else str(target),
        model_flops=_model_flops(config, staged, Vocab.size),
        fallbacks=sorted({str(w.message) for w in said if "alling back" in str(w.message)}),
    )
    if isinstance(compiled, int):
        return MeshReport.too_large(compiled, **common)
    program = Program.read(compiled.as_text() or "")
    costs: Any = compiled.cost_analysis() or {}
    axes = dict(trainer_config.device_mesh.shape)
    places = None if machine is None else [machine[d.id] for d in devices]
    return MeshReport(
        **common,
        **measured(compiled, program),
        xla_flops=float(costs.get("flops", 0.0)),
        unknown_loops=program.unknown_loops,
        collectives=collectives(program, axes, places),
        whole_temporaries=whole_temporaries(program, lowered.as_text(), large),
    )


def measured(compiled: Compiled, program: Program) -> dict[str, Any]:
    """Memory, work and kernels of a compiled step, as fields of `MeshReport`.

    Args:
        program: its parsed text.
    """
    memory: Any = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "donated": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "flops": matrix_flops(program),
        "fp32_flops": matrix_flops(program, "f32"),
        "bytes_accessed": memory_traffic(program),
        "attention": attention_kernel(program),
    }


def compiled_or_needed(lowered: Lowered) -> Compiled | int:
    """The program, or the bytes that a device would need according to its compiler, if it has less."""
    try:
        return lowered.compile(_QUICK if jax.default_backend() == "cpu" else None)
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"Total hbm usage >= ([\d.]+)([KMGT]?)", str(error))
        needed = needed or re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", str(error))
        if needed is None:
            raise
        return int(float(needed[1]) * 1024 ** ("KMGT".index(needed[2]) + 1 if needed[2] else 0))


def _deepest(model: LmConfig) -> tuple[int, LmConfig]:
    """The stage of training with the most steps, and its model; stage 0 of a model whose depth does not grow."""
    if not isinstance(model, NeuralOdeConfig):
        return 0, model
    return len(model.stages) - 1, model.stages[-1]  # numbers of steps increase


def _model_flops(config: TrainConfig, model: LmConfig, vocab_size: int) -> float:
    """FLOPs of a step on all devices, as training counts them for its MFU: three times the forward pass of `model`,
    without the generation of W(t) and recomputation; 0 if the number of evaluations is unknown."""
    per_token = model.flops_per_token(vocab_size, config.Pos.size) or 0.0
    return 3.0 * per_token * config.Pos.size * largest_batch(config.trainer)


def _check_kernel(model: Any) -> None:
    """Virtual devices are CPUs, which lack some attention kernels."""
    for owner in (model, getattr(model, "block", None)):
        backend = getattr(owner, "attn_backend", None)
        if backend is not None and backend.value in ("nvte", "splash"):
            where = "model" if owner is model else "model.block"
            raise UserError(
                f"`{where}.attn_backend` is {backend.value}, which virtual devices do not have. Add"
                f" --{where}.attn_backend null: the memory of attention is then that of JAX's flash attention"
            )


def _mesh(trainer: TrainerConfig) -> dict[str, int]:
    return {name: size for name, size in trainer.device_mesh.shape.items() if size > 1}


def _on_device(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings on one device."""

    def part(leaf):
        array = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not isinstance(array, jax.ShapeDtypeStruct) or array.sharding is None:
            return leaf
        return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)

    return tree_bytes(jax.tree.map(part, tree, is_leaf=is_named))
