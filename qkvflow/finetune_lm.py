"""Fine-tunes a trained run, optionally at another depth: the flow itself, all ordinary weights, or LoRA; merges LoRA.

    qkvflow finetune --config_path configs/finetune/quickstart_lora.yaml
    qkvflow finetune --run runs/finetune-quickstart_lora --merge

The second writes `runs/finetune-quickstart_lora-merged`, an ordinary run that does not need its base.
"""

import functools
from pathlib import Path

import jax

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.program import conclude
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import differences
from qkvflow.errors import UserError
from qkvflow.places import Place
from qkvflow.progress import Progress
from qkvflow.runs.checkpoints import newest_good
from qkvflow.runs.config import FREE_KEYS, FinetuneConfig
from qkvflow.runs.directory import RunDirectory, location_of, run_id
from qkvflow.runs.load import find_run
from qkvflow.runs.merge import merge_run
from qkvflow.runs.prepare import check_is_same
from qkvflow.training.finetune import finetune_directory, settle
from qkvflow.training.session import join, train_run
from qkvflow.training.start import FromBase
from qkvflow_command import called


def main(config: FinetuneConfig) -> Path | Place:
    """Fine-tunes, continues a fine-tune, or merges one; says what can be done next.

    Returns:
        the run directory; with `merge` that of the merged run.

    Raises:
        UserError: before any work if a setting cannot work.
        SystemExit: with the signal's status if SIGTERM or Ctrl-C stopped the training; a checkpoint is written first.
    """
    only_merges = config.merge and config.mode is None
    if only_merges and config.run is None:
        raise UserError("name the LoRA run to merge: --run runs/<id> --merge")
    if only_merges:
        _check_only_merges(config)
    join(config.trainer)  # an official base has arrays
    if config.merge and jax.process_count() > 1:
        raise UserError(
            f"--merge works in one process, but there are {jax.process_count()}. Train without it, and then merge in"
            f" one: {called('finetune')} --run runs/<id> --merge"
        )
    if only_merges and config.run is not None:
        return _merge(find_run(config.run), config)
    settled, base, mode = settle(config)
    directory = finetune_directory(config)
    if config.merge:
        _target(directory, config, free=True)
    if config.merge and _is_finished(directory, settled):
        check_is_same(directory, settled)
    else:
        with quiet_libraries() as quiet:
            trained = train_run(settled, functools.partial(FromBase.of, base=base, mode=mode), quiet)
        conclude(trained.text, trained.exit_status)
        if trained.text and not (config.merge or mode.stores_base):
            merge = f"{called('finetune')} --run {directory} --merge"
            print(f"To merge LoRA into the weights: {merge}", flush=True)
    if config.merge:
        return _merge(directory, config)
    return directory.location


def _check_only_merges(config: FinetuneConfig) -> None:
    """
    Raises:
        UserError: a setting of a training, which merging alone does not read.
    """
    given = differences(FinetuneConfig(), config, (*FREE_KEYS, "run", "checkpoint_step", "trainer.id"))
    if given:
        raise UserError(
            f"--merge without a `mode` merges a finished LoRA run, and does not read {', '.join(given)}. Leave"
            f" {'it' if len(given) == 1 else 'them'} out, or give the `mode` of a training"
        )


def _is_finished(directory: RunDirectory, config: FinetuneConfig) -> bool:
    step, _ = newest_good(directory.checkpoints)
    return step is not None and step + 1 >= config.trainer.num_train_steps


def _target(source: RunDirectory, config: FinetuneConfig, *, free: bool = False) -> Path | Place:
    """Where the merged run goes: beside the LoRA run, as `<id>-merged`, unless a name or place is given."""
    name = f"{source.path.name}-merged"
    if config.mode is None and config.trainer.id is not None:
        name = run_id(config.trainer.id, None)
    moved = config.mode is None and config.run_dir != FinetuneConfig().run_dir
    target = (location_of(config.run_dir) if moved else source.location.parent) / name
    if free and target.exists():
        raise UserError(f"{target} already exists. Remove it, or choose another name with --trainer.id NAME")
    return target


def _merge(source: RunDirectory, config: FinetuneConfig) -> Path | Place:
    step = config.checkpoint_step if config.mode is None else None
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Merging {source}"):
            merged = merge_run(source.location, _target(source, config), step)
    print(f"The merged run is in {merged}; it does not need its base", flush=True)
    return merged


if __name__ == "__main__":
    run_program(main, FinetuneConfig)
