"""Completes the configuration of a fine-tune from its base, before any work: depth, tokenizer, vocabulary, targets."""

import dataclasses
import tempfile
from pathlib import Path

from qkvflow.config.levanter_ranges import LEVANTER
from qkvflow.data import load_tokenizer, number_of_ids, resolve_tokenizer, same_tokenizer
from qkvflow.errors import UserError
from qkvflow.places import Place
from qkvflow.ranges import check_ranges
from qkvflow.runs.base import Base, BaseRecord, OfficialBase
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.config import FinetuneConfig
from qkvflow.runs.directory import RunDirectory, location_of, run_id
from qkvflow.runs.load import RunBase, find_run, is_adapter
from qkvflow.runs.modes import FinetuneMode
from qkvflow.runs.prepare import has_begun
from qkvflow.training.start import FromBase, RecordedBase, adapted_shape
from qkvflow_command import called


def settle(config: FinetuneConfig) -> tuple[FinetuneConfig, Base, FinetuneMode]:
    """The configuration with everything that follows from the base: model, vocabulary, tokenizer, checkpoint.

    Raises:
        UserError: a base that is not there, unfinished, or has another tokenizer or vocabulary than asked for; for a
            depth that it cannot have; for LoRA targets that match nothing.
    """
    mode = config.mode
    if mode is None:
        raise UserError(
            "the key `mode` is missing: {type: flow}, {type: full}, {type: stack} or {type: lora, r: 8, alpha: 8}"
        )
    if (config.run is None) == (config.official is None):
        raise UserError("give a base: either `run: runs/<id>`, or `official: {path, num_heads, steps}`")
    check_ranges(config, LEVANTER)
    if config.merge and mode.stores_base:
        raise UserError(
            "`merge` merges LoRA into the weights, but this mode trains the weights themselves: leave it out"
        )
    if config.trainer.initialize_from is not None:
        raise UserError("`trainer.initialize_from` cannot be set: a fine-tune starts from `run` or `official`")
    directory = finetune_directory(config)
    base = _open(config, directory, mode)
    if directory.place.resolved() == Place.of(base.path).resolved():
        raise UserError(f"the fine-tune would write into its base {base.path}: give it a name with --trainer.id NAME")
    if not mode.stores_base and config.run is not None and is_adapter(find_run(config.run)):
        raise UserError(
            f"{config.run} is a LoRA run, which cannot be the base of another. Merge it first:"
            f" {called('finetune')} --run {config.run} --merge"
        )
    model = mode.model_config(base.model, config.steps)
    if config.model not in (None, model):
        raise UserError("`model` cannot be set: it follows from the base, `steps` and `mode`. Leave it out")
    if config.vocab_size not in (None, base.Vocab.size):
        raise UserError(f"`vocab_size` is {config.vocab_size}, but {base.path} has a vocabulary of {base.Vocab.size}")
    tokenizer = _tokenizer(config.data.tokenizer, base)
    adapted_shape(base, mode, model)
    settled = dataclasses.replace(
        config,
        model=model,
        vocab_size=base.Vocab.size,
        checkpoint_step=base.checkpoint_step,
        data=dataclasses.replace(config.data, tokenizer=tokenizer),
    )
    return settled, base, mode


def finetune_start(config: FinetuneConfig) -> tuple[FinetuneConfig, FromBase]:
    """A configuration, settled, and where its model comes from; see `settle`."""
    settled, base, mode = settle(config)
    return settled, FromBase(settled.model, finetune_directory(config), base, mode)


def finetune_directory(config: FinetuneConfig) -> RunDirectory:
    """Where the run of this configuration lies, or will lie."""
    directory = RunDirectory.at(location_of(config.run_dir) / run_id(config.trainer.id, config.config_path))
    directory.pull()
    return directory


def _open(config: FinetuneConfig, directory: RunDirectory, mode: FinetuneMode) -> Base:
    record = BaseRecord.read(directory) if has_begun(directory) else None
    if record is not None and mode.stores_base and checkpoint_steps(directory.checkpoints):
        recorded = RecordedBase.of(directory, record)  # its checkpoints hold everything: the base may be gone
        if config.checkpoint_step not in (None, recorded.checkpoint_step):
            raise UserError(
                f"{directory} was begun from checkpoint step-{recorded.checkpoint_step} of its base, but"
                f" `checkpoint_step` is {config.checkpoint_step}. Leave it out to continue, or give the new run a name"
                " with --trainer.id NAME"
            )
        return recorded
    if config.official is not None:
        return OfficialBase.open(config.official)
    assert config.run is not None
    if config.checkpoint_step is None and record is not None:  # the base may have been trained on since this run began
        return RunBase.open(config.run, record.checkpoint_step, directory.location)
    return RunBase.open(config.run, config.checkpoint_step)


def _tokenizer(asked: str | None, base: Base) -> str:
    """The name of the base's tokenizer; `asked` may be another name of the same."""
    if base.tokenizer is None:
        return _tokenizer_of_official(asked, base)
    folder, name = base.tokenizer
    if asked is None or asked == name:
        return name
    with tempfile.TemporaryDirectory() as scratch:
        try:
            is_same, reason = same_tokenizer(resolve_tokenizer(asked, Path(scratch)), folder), ""
        except UserError as error:
            is_same, reason = False, f" ({error})"
    if not is_same:
        raise UserError(
            f"`data.tokenizer` is {asked!r}, but {base.path} was trained with another one ({name!r}), and its"
            f" embeddings have no meaning for other tokens. Leave `data.tokenizer` out{reason}"
        )
    return name


def _tokenizer_of_official(asked: str | None, base: Base) -> str:
    if asked is None:
        raise UserError(f"{base.path} does not name its tokenizer: give `data.tokenizer`, such as tiktoken:gpt2")
    with tempfile.TemporaryDirectory() as scratch:
        tokens = number_of_ids(load_tokenizer(resolve_tokenizer(asked, Path(scratch))))
    # A vocabulary is rounded up for the mesh, but never to twice its size.
    if not tokens <= base.Vocab.size < 2 * tokens:
        raise UserError(
            f"`data.tokenizer` is {asked!r} with {tokens} tokens, but {base.path} has {base.Vocab.size} embeddings: use"
            " the tokenizer that it was trained with"
        )
    return asked
