"""Hugging Face folders as runs: the configuration that represents one, and a run created from one."""

from pathlib import Path

from levanter.models.lm_model import LmHeadModel

from qkvflow.data import DataConfig, copy_tokenizer, load_tokenizer, number_of_ids
from qkvflow.errors import UserError
from qkvflow.hub.families import model_config
from qkvflow.hub.folder import HubFolder
from qkvflow.hub.read import read_model, vocabulary
from qkvflow.hub.tokenizer import save_tokenizer
from qkvflow.places import Place
from qkvflow.runs.config import RunTrainerConfig, TrainConfig
from qkvflow.runs.made import new_run, refuse_target

_LONGEST_TEXT = 1024  # tokens of a text to evaluate on: many models could take more than most data sets have
_BATCH = 8


def hub_config(folder: HubFolder, data: DataConfig | None = None) -> TrainConfig:
    """What a run with the model of a folder says of itself: finished after its only step.

    Args:
        data: to evaluate on; by default the built-in text.

    Raises:
        UserError: the folder's model is none that is read here.
    """
    model = model_config(folder.settings, str(folder.path))
    data = DataConfig(tokenizer=str(folder.path.resolve())) if data is None else data
    trainer = RunTrainerConfig(num_train_steps=1, train_batch_size=_BATCH)
    length = min(model.max_seq_len, _LONGEST_TEXT)
    return TrainConfig(model, data, trainer, train_seq_len=length, vocab_size=vocabulary(folder))


def read_hub_model(folder: HubFolder, config: TrainConfig, tokenizer: Path) -> LmHeadModel:
    """The model of a folder.

    Raises:
        UserError: the folder is damaged, or its tokenizer has more tokens than its model.
    """
    loaded = load_tokenizer(tokenizer)
    tokens = number_of_ids(loaded)
    if tokens > (config.vocab_size or 0):
        raise UserError(
            f"the tokenizer in {folder.path} has {tokens} tokens, but the model only has {config.vocab_size}: its"
            " embedding has no rows for the last ones. Use the tokenizer that the model was trained with"
        )
    return read_model(folder, config.model, loaded)


def import_run(folder: HubFolder, target: Path | Place, data: DataConfig) -> Path | Place:
    """Makes `target` a run directory with the model and the tokenizer of a folder. Returns: `target`.

    Raises:
        UserError: the folder cannot be read, or `target` exists. Nothing is written then.
    """
    refuse_target(target, "--run")
    config = hub_config(folder, data)
    with save_tokenizer(folder.path, data.tokenizer) as tokenizer:
        model = read_hub_model(folder, config, tokenizer)
        with new_run(target, config, model) as fresh:
            copy_tokenizer(tokenizer, fresh.tokenizer, data.tokenizer)
    return target
