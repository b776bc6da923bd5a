"""Runs created without training: a configuration and one checkpoint of the model, written completely or not at all."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from qkvflow.config import write_config
from qkvflow.errors import UserError
from qkvflow.files import fresh_name
from qkvflow.inside.levanter import save_checkpoint
from qkvflow.places import Place
from qkvflow.runs.checksum_manager import ChecksumManager
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory, check_name, run_id
from qkvflow.runs.disk import disk_errors_are_told


@contextlib.contextmanager
def new_folder(target: Path, flag: str) -> Iterator[Path]:
    """A folder for a `with` block to fill, which then gets the name `target`; it goes if the block fails.

    Args:
        flag: with which the user gives another name.

    Raises:
        UserError: `target` exists, or there is no place for it.
    """
    refuse_existing(target, flag)
    with disk_errors_are_told(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_name(fresh_name(target.name))
        made.mkdir()
        try:
            yield made
            refuse_existing(target, flag)
            os.rename(made, target)
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def new_run(target: Path | Place, config: TrainConfig, model: LmHeadModel, step: int = 0) -> Iterator[RunDirectory]:
    """Makes `target` a run directory with one checkpoint of `model` as it is after `step`; a `with` block adds the
    tokenizer, and what else the run is to have. In a bucket `config.yaml` comes last. It has no average of
    parameters.

    Raises:
        UserError: `target` exists, or its name is none for a run.
    """
    name = run_id(target.name, None)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, id=name, model_averaging=None))
    with contextlib.ExitStack() as stack:
        if isinstance(target, Place):
            refuse_existing(target, "another name")
            fresh = RunDirectory.at(target.url)
            fresh.path.mkdir(parents=True, exist_ok=True)
        else:
            fresh = RunDirectory(stack.enter_context(new_folder(target, "another name")))
        checkpoint, manager = fresh.checkpoints / f"step-{step}", ChecksumManager()
        with TrainerConfig().use_device_mesh():
            save_checkpoint({"model": model}, step, str(checkpoint), manager, is_temporary=False)
            manager.wait_until_finished()
        yield fresh
        write_config(fresh.config, config)
        fresh.push()


def refuse_target(target: Path | Place, flag: str) -> None:
    """Raises:
    UserError: there is something at `target` already, or a run cannot have its name.
    """
    check_name(target.name, f"the name of the run ({flag})")
    refuse_existing(target, flag)


def refuse_existing(target: Path | Place, flag: str) -> None:
    """Raises:
    UserError: there is something at `target` already.
    """
    if target.exists() or (isinstance(target, Path) and target.is_symlink()):
        raise UserError(f"{target} already exists. Remove it, or choose another one with {flag}")
