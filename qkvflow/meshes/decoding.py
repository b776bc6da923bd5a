"""Compiles a decoding step of `serve_lm` on one device from shapes, and determines its cost."""

import resource
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax.sharding import SingleDeviceSharding
from levanter.utils.tree_utils import inference_mode

from qkvflow.errors import UserError
from qkvflow.generation import compiled
from qkvflow.generation.engine import room_for
from qkvflow.generation.flat import flat
from qkvflow.generation.precision import cast
from qkvflow.generation.state import State
from qkvflow.meshes.ahead import compiled_or_needed, measured
from qkvflow.meshes.collectives import collectives
from qkvflow.meshes.hlo import Program
from qkvflow.meshes.report import MeshReport
from qkvflow.meshes.target import Target
from qkvflow.meshes.whole import LARGE
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel
from qkvflow.models.cached import CachedModel
from qkvflow.models.levanter_twin import enter
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import key_shape, tree_bytes


def compile_decoding(config: TrainConfig, tokens: int, slots: int, dtype: str | None, target: Target) -> MeshReport:
    """The report for one token in each of `slots` texts of the model's training length.

    Args:
        tokens: size of the tokenizer's vocabulary.
        dtype: `bf16` or `f32`; by default that of the weights.

    Raises:
        UserError: the model does not cache keys and values.
    """
    Vocab, length = Axis("vocab", config.vocab_size or tokens), config.model.max_seq_len

    def make(key) -> CachedModel:
        model = inference_mode(enter(config.model.build(Vocab, key=key)), True)
        if not isinstance(model, NeuralOdeLMHeadModel):
            raise UserError(f"--serve: a decoding step of {type(model).__name__} cannot be compiled")
        return cast(CachedModel.of(model), dtype)

    model = eqx.filter_eval_shape(make, key_shape())
    control = getattr(config, "control_dim", None)
    state = jax.eval_shape(lambda: State.empty(model, slots, length, room_for(length), control))
    (model_arrays, model_kind), (state_arrays, state_kind) = _placed(model), _placed(state)
    began = time.monotonic()
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = compiled.decode.lower(model_arrays, state_arrays, steps, ((), tokens), kinds=(model_kind, state_kind))
    done = compiled_or_needed(lowered)
    model_bytes = tree_bytes(model)
    read = config.model.reading if isinstance(config.model, NeuralOdeConfig) else config.model
    common: dict[str, Any] = dict(
        mesh={},
        devices=1,
        parameters=model_bytes,
        optimizer=0,
        all_parameters=model_bytes,
        all_optimizer=0,
        given=model_bytes + tree_bytes(state),
        whole_arguments=[],
        large=LARGE,
        rematerialised=0,
        compile_seconds=time.monotonic() - began,
        compile_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        target=str(target),
        model_flops=slots * (read.flops_per_token(Vocab.size, length) or 0.0),
        texts=slots,
    )
    if isinstance(done, int):
        return MeshReport.too_large(done, **common)
    program = Program.read(done.as_text() or "")
    return MeshReport(
        **common,
        **measured(done, program),
        xla_flops=0.0,
        unknown_loops=0,  # the loop over tokens runs once
        collectives=collectives(program),
        whole_temporaries=[],
    )


def _placed(tree):
    """The shapes of a tree's arrays, placed on the first device, and the tree's structure."""
    here = SingleDeviceSharding(jax.devices()[0])
    shapes, kind = flat(tree)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in shapes], kind
