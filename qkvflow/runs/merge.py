"""Writes LoRA into the weights: from a run that holds only what it trained, an ordinary run that stands alone."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from levanter.trainer import TrainerConfig

from qkvflow.config import read_config, write_config
from qkvflow.data import copy_tokenizer
from qkvflow.errors import UserError
from qkvflow.inside.levanter import save_checkpoint
from qkvflow.runs.checksums import ChecksumManager
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.load import find_run, is_adapter, load_run
from qkvflow.runs.places import Place


def merge_run(path: str | os.PathLike, target: Path | Place, checkpoint_step: int | None = None) -> Path | Place:
    """Makes `target` a run directory with the merged model of the LoRA run at `path`.

    It holds the configuration, the tokenizer, the metrics and one checkpoint, of the model alone; it does not need the
    base any more.

    Returns:
        `target`.

    Raises:
        UserError: there is no such run or it is none of LoRA, if its base is gone or has changed, and if `target`
            exists.
    """
    source = find_run(path)
    if not is_adapter(source):
        raise UserError(f"{source} is no LoRA run, so there is nothing to merge: its weights are whole")
    if target.exists():
        raise UserError(f"{target} exists already. Remove it, or choose another name with --trainer.id NAME")
    run = load_run(source.location, checkpoint_step)
    config = read_config(source.config, TrainConfig)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, id=target.name))
    # Made beside and renamed, so that a folder of this name is always whole; in a bucket `config.yaml` comes last.
    fresh = RunDirectory.at(target if isinstance(target, Place) else target.with_name(f".{target.name}.making"))
    shutil.rmtree(fresh.path, ignore_errors=True)
    fresh.path.mkdir(parents=True)
    checkpoint, manager = fresh.checkpoints / f"step-{run.step}", ChecksumManager()
    with TrainerConfig().use_device_mesh():
        save_checkpoint({"model": run.model}, run.step, str(checkpoint), manager, is_temporary=False)
        manager.wait_until_finished()
    copy_tokenizer(source.tokenizer, fresh.tokenizer)
    shutil.copyfile(source.metrics, fresh.metrics)
    origin = {"run": str(source.place.resolved()), "checkpoint_step": run.step}
    (fresh.path / "merged_from.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    write_config(fresh.config, config)
    if isinstance(target, Place):
        fresh.push()
    else:
        os.rename(fresh.path, target)
    return target
