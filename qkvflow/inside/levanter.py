"""Levanter internals: checkpoints, the training step, device settings, a tokenizer's end token, logged metrics."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import levanter.checkpoint
from fsspec.core import url_to_fs
from jax._src.core import trace_state_clean
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.stages import Lowered
from levanter.checkpoint import Checkpointer as Checkpointer
from levanter.checkpoint import save_checkpoint as save_checkpoint
from levanter.kernels.pallas.fused_cross_entropy_loss import api as cross_entropy
from levanter.tokenizers import MarinTokenizer
from levanter.tracker import tracker_fns
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState

from qkvflow.inside.haliax import Program

__all__ = [
    "Checkpointer",
    "StepTrainer",
    "StoppableCheckpointer",
    "bare_step",
    "checkpoint_of",
    "save_checkpoint",
    "set_manager",
    "settle_devices",
    "with_special_token",
    "with_template",
    "without_limits",
]


def set_manager(checkpointer: Checkpointer, manager: GlobalAsyncCheckpointManager) -> None:
    """Makes `manager` write the arrays of checkpoints.

    Reason: the checkpointer creates its own and does not accept one.
    """
    checkpointer._manager = manager


class StoppableCheckpointer(Checkpointer):
    """Levanter's checkpointer, able to save a state to resume from; a subclass defines how checkpoints are removed.

    Reason: Levanter keeps checkpoints saved on request for ever, so a run that is stopped often would fill its disk.
    And it removes a checkpoint's files in any order: if killed in between, it leaves one that looks complete.
    """

    def remove(self, checkpoint: str) -> None:
        """Removes the folder of a checkpoint."""
        super()._do_rm_checkpoint(checkpoint)

    def save_to_continue(self, tree: Any, step: int) -> None:
        """Saves a temporary checkpoint: it replaces those before it, and the next due one replaces it. At a step whose
        checkpoint is to be kept, saves that one."""
        every = self._get_current_step_save_interval(step)
        if step > 0 and every is not None and step % every == 0:
            self.on_step(tree=tree, step=step)
            return
        name = f"step-{step}"

        def replace() -> None:
            if jax.process_index() == 0:
                self._record_temporary_checkpoint(os.path.join(self.base_path, name))
                self._prune_temporary_checkpoints(self.keep_last_temporary_checkpoints)

        self.save_checkpoint(tree, step, name, replace, is_temporary=True)

    def _do_rm_checkpoint(self, cp_path: str) -> None:
        self.remove(cp_path)


def checkpoint_of(specs: Sequence[Mapping[str, Any]]) -> str:
    """The folder or URL of the checkpoint to which arrays with these TensorStore specs are written.

    Reason: a manager receives the paths of arrays, but not that they belong to a checkpoint.
    """
    base = specs[0]["kvstore"]["base"]
    scheme = {"gcs": "gs", "s3": "s3"}.get(base["driver"])
    return base["path"] if scheme is None else f"{scheme}://{base['bucket']}/{base['path']}"


def with_special_token(tokenizer: MarinTokenizer, kind: Literal["bos", "eos"], token: int) -> MarinTokenizer:
    """The tokenizer with another begin-of-text or end-of-text token.

    Reason: Levanter reads them from `tokenizer_config.json` only, transformers from `special_tokens_map.json` too; for
    GPT-2, whose file names none, transformers knows them by the class, and models the latter by
    `generation_config.json` and `config.json`.
    """
    special, text = sorted({*tokenizer.all_special_ids, token}), tokenizer.convert_ids_to_tokens(token)
    return dataclasses.replace(tokenizer, **{f"_{kind}_id": token, f"_{kind}_token": text, "_all_special_ids": special})


def with_template(tokenizer: MarinTokenizer, template: str | None) -> MarinTokenizer:
    """The tokenizer with this chat template. For None it keeps its own; of several named ones the default, or none if
    there is no default.

    Reason: Levanter takes a list of named templates in `tokenizer_config.json` for one template, and prefers that file
    to `chat_template.jinja`, which transformers prefers.
    """
    if template is None:
        given = tokenizer.chat_template
        if not isinstance(given, list):
            return tokenizer
        template = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}.get("default")
    changes = {"_chat_template": template}
    return dataclasses.replace(tokenizer, **changes)


def without_limits(tokenizer: MarinTokenizer) -> MarinTokenizer:
    """The tokenizer (changed in place), which now neither cuts texts nor fills them up.

    Reason: Levanter keeps `truncation` and `padding` of `tokenizer.json` for every call, unlike transformers. They are
    meant for batches of short texts, often of the model's last use; here they would cut texts and add tokens unseen.
    """
    inner = tokenizer._tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    inner.no_truncation()
    inner.no_padding()
    return tokenizer


def settle_devices(trainer: TrainerConfig) -> None:
    """Fills in what follows from the mesh: parallelism per device, and batch sizes given as -1 (in place).

    Reason: `trainer.initialize()` does this too, but also starts Levanter's log on the terminal and its tracker.

    Raises:
        ValueError: batch size and devices do not fit.
    """
    trainer._validate_and_set_defaults()


class StepTrainer(Trainer):
    """Levanter's trainer, whose subclass sees the result of a step inside the compiled program; with stages, each of
    which has its own compiled step.

    The loss also gets the keyword `step_key`: of parts of a batch whose gradients are accumulated each has its own
    `key`, and all have this one.

    Reason: Levanter has no hook for work on the whole new state (its hooks only see gradients), compiles one step, and
    gives nothing to the parts of a batch that they have in common.

    Attributes:
        stage: of a model with growing depth; the loss uses it while a step is traced.
    """

    stage: int = 0

    @property
    def _jit_train_step_fn(self):
        return self._jitted(no_hooks=False)

    @property
    def _jit_train_step_fn_no_hook(self):
        return self._jitted(no_hooks=True)

    def _jitted(self, *, no_hooks: bool):
        compiled = self.__dict__.setdefault("_steps_by_stage", {})
        if (self.stage, no_hooks) not in compiled:
            step = functools.partial(self._train_step, _no_hooks=no_hooks)
            compiled[self.stage, no_hooks] = Program(step, self.parameter_axis_mapping)
        return compiled[self.stage, no_hooks]

    def lower(self, state: TrainerState, batch: Any) -> Lowered:
        """The step without hooks, from arrays or from shapes; to be called within `with trainer`."""
        return self._jit_train_step_fn_no_hook.lower(state, (batch,), {})

    def see(self, state: TrainerState, result: Any) -> Any:
        """The result of the step from `state`, or a replacement."""
        return result

    def _train_step(self, state: TrainerState, batch: Any, batch_kwargs: Any, _no_hooks: bool = False) -> Any:
        return self.see(state, super()._train_step(state, batch, batch_kwargs, _no_hooks=_no_hooks))

    def whole(self, *batch: Any) -> Any:
        """What the loss of a part needs to know of the whole batch."""
        return None

    def _compute_gradients_microbatched(self, loss_fn: Any, model: Any, *batch: Any, key: Any = None, **kwargs: Any):
        whole = self.whole(*batch)

        def loss(model: Any, *batch: Any, **kwargs: Any) -> Any:
            return loss_fn(model, *batch, step_key=key, whole=whole, **kwargs)

        return super()._compute_gradients_microbatched(loss, model, *batch, key=key, **kwargs)


def bare_step(trainer: Trainer, state: TrainerState, batch: Any, *, hooks: bool = False) -> Any:
    """One step, by default without hooks, to be traced.

    Reason: Levanter's `train_step` is already compiled and needs arrays; only this accepts shapes, and can be vmapped.
    """
    return trainer._train_step(state, (batch,), {}, _no_hooks=not hooks)


def _file_system(path: Any, fs: Any = None) -> tuple[Any, str]:
    return (fs, path) if fs is not None else url_to_fs(str(path))


def _is_tracing() -> bool:
    """Whether JAX is tracing a function."""
    return not trace_state_clean()


def _checkpoints_in(folder: str) -> list[str]:
    """The checkpoints among `folder` and its contents, ordered by name."""
    fs, plain = url_to_fs(str(folder))
    names = [os.path.basename(entry["name"]) for entry in fs.ls(plain, detail=True)] if fs.isdir(plain) else []
    places = [str(folder), *(os.path.join(folder, name) for name in names)]
    return sorted(place for place in places if fs.exists(os.path.join(url_to_fs(place)[1], "metadata.json")))


# Reason: Levanter expands paths of checkpoints as globs. For a run in the folder `runs[1]` it would find, and delete,
# checkpoints of the run in `runs1`; and in a folder with `*` in its name nothing could be saved. So all code that saves
# or searches checkpoints imports `Checkpointer` and `save_checkpoint` from here.
levanter.checkpoint._get_fs_and_plain_path = _file_system
levanter.checkpoint._discover_checkpoint_paths_single = _checkpoints_in

# Reason: on a GPU Levanter tries its Pallas kernel of the cross-entropy first, with blocks chosen by compiling them. It
# has not been measured here, and `describe --target` compiles XLA's: the loss is XLA's on every platform.
cross_entropy.IMPLEMENTATIONS.pop("pallas_gpu", None)

# Reason: to see whether a function is being traced, Levanter makes an array with each call of `log`. With five seeds at
# once that is 25 small programs for each step, and about a quarter of the time that Python takes.
tracker_fns.is_inside_jit = _is_tracing
