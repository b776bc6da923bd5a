"""Loads a run: its configuration, its model at a checkpoint, its tokenizer."""

import contextlib
import dataclasses
import difflib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from haliax import Axis
from levanter.checkpoint import load_checkpoint
from levanter.models.lm_model import LmHeadModel
from levanter.tokenizers import MarinTokenizer
from levanter.trainer import TrainerConfig
from levanter.trainer_state import trainables_only
from levanter.utils.tree_utils import inference_mode

from qkvflow.checksums import damage_of
from qkvflow.config import read_config
from qkvflow.data import load_tokenizer, number_of_ids
from qkvflow.errors import Notice, UserError, first_line
from qkvflow.models import NeuralOdeLMHeadModel, lora
from qkvflow.named import is_named
from qkvflow.places import Place
from qkvflow.runs.base import Base, BaseRecord, OfficialBase
from qkvflow.runs.buckets import bucket_errors_are_told
from qkvflow.runs.checkpoints import Damaged, all_damaged, checkpoint_steps, keep, newest_good
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.disk import disk_errors_are_told
from qkvflow.runs.hub import hub_config, read_hub_model


@dataclass(frozen=True)
class Run:
    """A loaded run; `config, model, tokenizer = run` unpacks the first three.

    Attributes:
        config: the configuration it was trained with.
        model: the model in inference mode (no dropout).
        tokenizer: Levanter's wrapper of the run's own tokenizer.
        step: the model is as it was after this step (the first step is 0).
        directory: of the run.
    """

    config: TrainConfig
    model: LmHeadModel
    tokenizer: MarinTokenizer
    step: int
    directory: RunDirectory

    @property
    def path(self) -> Path:
        """The folder of its small files; of a run in a bucket that of their copies."""
        return self.directory.path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.config, self.model, self.tokenizer))


def load_run(
    path: str | os.PathLike, checkpoint_step: int | None = None, *, merge: bool = True, averaged: bool = False
) -> Run:
    """Loads a run directory. First compares the files of its checkpoint with their checksums.

    Args:
        path: the run directory, `runs/<id>`, or `gs://bucket/runs/<id>`; or a Hugging Face folder, which is loaded like
            a run.
        checkpoint_step: N of the checkpoint `step-N`; defaults to the newest good one, with a warning (`Notice`) if a
            newer one is damaged. Where depth grows in training, the model has the steps of that time.
        merge: for a LoRA run: add its low-rank terms to the base's weights, which gives an ordinary model; otherwise
            they stay separate, as in training.
        averaged: the average of the parameters over steps (`trainer.model_averaging`), instead of the last ones.

    Raises:
        UserError: there is no such run, no checkpoint, or no checkpoint of that step; that checkpoint or all are
            damaged; the base of a LoRA run is missing or has changed; or the run has no average.
    """
    directory = find_run(path)
    with disk_errors_are_told(directory.path), bucket_errors_are_told(directory.place):
        run = _read_run(directory, _choose_step(directory, checkpoint_step), merge, averaged)
    return dataclasses.replace(run, model=_at_trained_depth(run))


def _at_trained_depth(run: Run) -> LmHeadModel:
    """The model; where depth grows in training, with the steps that it had at this checkpoint."""
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        return run.model
    depth = run.model.config.depth
    reached = depth.reached(run.step, run.config.trainer.num_train_steps)
    return run.model if reached is depth else run.model.with_depth(reached)


def _read_run(directory: RunDirectory, step: int, merge: bool = True, averaged: bool = False) -> Run:
    config = stored_config(directory)
    if averaged and config.trainer.model_averaging is None:
        raise UserError(
            f"{directory} has no average to load: it was trained without trainer.model_averaging. Leave `averaged` out"
        )
    part = "model_averaging/model" if averaged else "model"
    tokenizer = load_tokenizer(directory.tokenizer)
    if directory.hub is not None:
        model = read_hub_model(directory.hub, config, directory.tokenizer)
        return Run(config, inference_mode(model, True), tokenizer, step, directory)
    vocab = Axis("vocab", number_of_ids(tokenizer) if config.vocab_size is None else config.vocab_size)
    checkpoint = directory.checkpoints / f"step-{step}"
    if is_adapter(directory):
        model = _read_adapter(directory, checkpoint, part)
        model = lora.merge(model) if merge else model
    else:
        model_config = with_local_tokenizer(config.model, directory.tokenizer)
        model = _read_arrays(
            checkpoint,
            lambda key: config.trainer.mp.cast_to_param(model_config.build(vocab, key=key)),
            part,
        )
    return Run(config, inference_mode(model, True), tokenizer, step, directory)


def is_adapter(directory: RunDirectory) -> bool:
    """Whether the checkpoints of a run hold only what LoRA trained."""
    if not directory.base.is_file():
        return False
    mode = read_config(directory.config, FinetuneConfig).mode
    return mode is not None and not mode.stores_base


@dataclass(frozen=True)
class RunBase(Base):
    """A run that is fine-tuned."""

    step: int

    @staticmethod
    def open(
        path: str | os.PathLike, checkpoint_step: int | None = None, child: Path | Place | None = None
    ) -> "RunBase":
        """A run at a checkpoint; the last one of a finished run if none is named.

        Args:
            child: a run that was made from this checkpoint, for messages.

        Raises:
            UserError: there is no such run or checkpoint, it is damaged, or the run is unfinished.
        """
        directory = find_run(path)
        config = stored_config(directory)
        step, total = _choose_step(directory, checkpoint_step, child), config.trainer.num_train_steps
        if checkpoint_step is None and step + 1 < total:
            raise UserError(
                f"the run {directory} is unfinished: its newest checkpoint is step-{step}, after {step + 1} of {total}"
                f" steps. Finish it, or use that checkpoint as it is with --checkpoint_step {step}"
            )
        assert config.vocab_size is not None  # `commit` has written it
        tokenizer = (directory.tokenizer, config.data.tokenizer)
        return RunBase(directory.location, config.model, Axis("vocab", config.vocab_size), tokenizer, step)

    def load(self) -> LmHeadModel:
        return _read_run(find_run(self.path), self.step).model

    def keep(self) -> None:
        with contextlib.suppress(OSError):  # of somebody else, or on a disk that is read-only
            keep(find_run(self.path).checkpoints, self.step)

    @property
    def checkpoint_step(self) -> int | None:
        return self.step


def load_base(directory: RunDirectory) -> LmHeadModel:
    """The parameters that the run in `directory` was fine-tuned from, checked against its record.

    Raises:
        UserError: they are gone or have changed.
    """
    record = BaseRecord.read(directory)
    assert record is not None
    first: UserError | None = None
    for path in record.places(directory):
        try:
            return _read_base(directory, record, path)
        except UserError as error:  # something else may stand at the recorded place
            first = first or error
    assert first is not None
    raise first


def _read_base(directory: RunDirectory, record: BaseRecord, path: Path | Place) -> LmHeadModel:
    """The base at `path`, or a `UserError` if it is not the one recorded."""
    if record.checkpoint_step is None:
        source = read_config(directory.config, FinetuneConfig).official
        assert source is not None
        base = OfficialBase.open(dataclasses.replace(source, path=str(path)))
    else:
        base = RunBase.open(path, record.checkpoint_step, directory.location)
    loaded = base.load()
    record.check(base, loaded)
    return loaded


def _read_adapter(directory: RunDirectory, checkpoint: Place, part: str) -> LmHeadModel:
    """The base with what LoRA trained beside it, from this part of a run's checkpoint."""
    config = read_config(directory.config, FinetuneConfig)
    mode = config.mode
    assert mode is not None
    model = mode.adapt(load_base(directory), config.model, key=jax.random.PRNGKey(0))
    trained = config.trainer.mp.cast_to_param(trainables_only(model, mode.trainable(model)))
    return eqx.combine(_read_arrays(checkpoint, lambda key: trained, part), model, is_leaf=is_named)


def _read_arrays(checkpoint: Place, build: Callable[[jax.Array], LmHeadModel], part: str) -> LmHeadModel:
    """The model, or its average, of a checkpoint, on the mesh of all devices, whatever mesh the run was trained on."""
    mesh = TrainerConfig().device_mesh
    with jax.set_mesh(mesh):
        shape = eqx.filter_eval_shape(build, jax.random.PRNGKey(0))
        try:
            with _without_warnings("levanter.tensorstore_serialization"):  # of parts that are None, as they should
                return load_checkpoint(shape, str(checkpoint), subpath=part, axis_mapping={}, mesh=mesh)
        except (ValueError, FileNotFoundError) as error:
            raise unreadable_checkpoint(checkpoint, error) from error


def stored_config(directory: RunDirectory) -> TrainConfig:
    """The configuration of a run; of a folder of Hugging Face, the one that stands for it."""
    return read_config(directory.config, TrainConfig) if directory.hub is None else hub_config(directory.hub)


def find_run(path: str | os.PathLike) -> RunDirectory:
    """The run directory at `path`, which may be a folder of Hugging Face; or a `UserError` that says what is there
    instead."""
    directory = RunDirectory.at(path)
    directory.pull()
    if directory.config.is_file() or directory.hub is not None:
        return directory
    place, shown = directory.place, directory.location
    if place.exists():
        inside = _runs_in(shown)
        listing = f"; runs in it: {', '.join(inside)}" if inside else ""
        raise UserError(f"{path} is not a run directory: it has no config.yaml{listing}")
    runs = _runs_in(shown.parent)
    near = difflib.get_close_matches(str(shown), runs, n=3) or runs[:8]
    listing = f"runs in {shown.parent}: {', '.join(near)}" if near else f"{shown.parent} has no runs"
    raise UserError(f"there is no run {path}; {listing}")


def _runs_in(folder: Path | Place) -> list[str]:
    if isinstance(folder, Path):
        return sorted(str(found.parent) for found in folder.glob("*/config.yaml"))
    return [str(folder / name) for name in folder.folders() if (folder / name).has("config.yaml")]


def with_local_tokenizer(model_config: Any, tokenizer: Path) -> Any:
    """The model's configuration with its `tokenizer` field, if it has one, set to a local folder.

    Levanter's own models name a tokenizer of the Hugging Face hub there, and ask the network for it.
    """
    if any(field.name == "tokenizer" for field in dataclasses.fields(model_config)):
        return dataclasses.replace(model_config, tokenizer=str(tokenizer))
    return model_config


def unreadable_checkpoint(checkpoint: Place | str, error: Exception) -> UserError:
    """What to tell the user when Levanter cannot load a complete checkpoint."""
    reason = first_line(error)
    return UserError(
        f"the checkpoint {checkpoint} cannot be loaded: {reason}. If you changed the model or the optimizer, shapes"
        " differ: start a new run with --trainer.id NAME. If the checkpoint is damaged, move this folder away; the"
        " previous checkpoint is then the newest"
    )


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _choose_step(directory: RunDirectory, wanted: int | None, child: Path | Place | None = None) -> int:
    """The step to read; `child`: a run that was made from exactly `wanted`, and has no choice."""
    if directory.hub is not None:
        if wanted:
            raise UserError(
                f"{directory} is not a run but a single model without checkpoints: leave out the step {wanted}"
            )
        return 0
    steps = checkpoint_steps(directory.checkpoints)
    if not steps and child is None:
        raise UserError(f"the run {directory} has no checkpoint yet; it writes one when it finishes or is stopped")
    if wanted is None:
        newest, damaged = newest_good(directory.checkpoints)
        if newest is None:
            raise all_damaged(damaged)
        for checkpoint in damaged:
            warnings.warn(Notice(f"{checkpoint}. Using step-{newest}, the newest good one, instead"), stacklevel=2)
        return newest
    path = directory.checkpoints / f"step-{wanted}"
    others = ", ".join(str(step) for step in steps if step != wanted)
    mend = f"The run {child} was made from it and needs it: restore it from a copy" if child is not None else ""
    if wanted not in steps:
        raise UserError(
            f"the run {directory} has no checkpoint of step {wanted}{f'. {mend}' if mend else f'; available: {others}'}"
        )
    what = damage_of(path)
    if what is not None:
        another = f"Leave --checkpoint_step out for the newest good one, or choose another: {others}" if others else ""
        raise UserError(f"{Damaged(path, what)}. {mend or another or 'Restore it from a copy'}")
    return wanted
