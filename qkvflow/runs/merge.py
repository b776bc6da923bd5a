"""Merges LoRA into the weights: turns a run with only LoRA's parameters into an ordinary run without a base."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from qkvflow.config import read_config
from qkvflow.data import copy_tokenizer
from qkvflow.errors import UserError
from qkvflow.files import write_text
from qkvflow.places import Place
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.load import find_run, is_adapter, load_run
from qkvflow.runs.made import new_run, refuse_existing


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
        raise UserError(f"{source} is not a LoRA run, so there is nothing to merge")
    refuse_existing(target, "--trainer.id NAME")
    run = load_run(source.location, checkpoint_step)
    config = read_config(source.config, TrainConfig)
    # The merged run does not go on: it is finished, also if the other one is not.
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, num_train_steps=run.step + 1))
    origin = {"run": str(source.place.resolved()), "checkpoint_step": run.step}
    with new_run(target, config, run.model, run.step) as fresh:
        copy_tokenizer(source.tokenizer, fresh.tokenizer, config.data.tokenizer)
        if source.metrics.is_file():
            shutil.copyfile(source.metrics, fresh.metrics)
        write_text(fresh.path / "merged_from.json", json.dumps(origin, indent=2) + "\n")
    return target
