"""The text of a run, ready for training: Levanter's datasets, the tokenizer, the unigram entropy to beat."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from haliax import Axis
from levanter.data import AsyncDataset
from levanter.data.text import DatasetComponent, LmDataConfig
from levanter.tokenizers import MarinTokenizer
from levanter.trainer import TrainerConfig

from qkvflow.data import TokenCounts, check_enough_tokens
from qkvflow.data.checks import component_of
from qkvflow.data.control.records import check_some_control
from qkvflow.data.packing import is_stream
from qkvflow.data.statistics import token_counts, unigram_entropy
from qkvflow.data.tokenizers import keep_template, number_of_ids
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.prepare import PreparedRun


@dataclass(frozen=True)
class Corpus:
    """
    Attributes:
        tokenizer: of the run.
        train: Levanter's training set of sequences.
        validation: Levanter's tagged validation sets; may be empty.
        train_tokens: size of the training text.
        train_sequences: sequences in an epoch; None if there is no such number, as for a mixture.
        unigram: cross-entropy of the text given for validation under single-token frequencies of the training text, in
            nats per token: what a model reaches that knows no context. None if no text is given.
    """

    tokenizer: MarinTokenizer
    train: AsyncDataset
    validation: Sequence[tuple[AsyncDataset, Sequence[str]]]
    train_tokens: int
    train_sequences: int | None
    unigram: float | None


def open_corpus(run: PreparedRun[TrainConfig], trainer: TrainerConfig, Pos: Axis, key: jax.Array) -> Corpus:
    """Builds or opens the token caches.

    Args:
        Pos: axis of one training sequence.
        key: of the order in which sequences are drawn.

    Raises:
        UserError: text that is missing, unreadable or shorter than one sequence, and for controls that are wrong or
            nowhere; before any work if the data is not what the run was started with.
    """
    config = run.config
    data = config.data.resolve(run.directory.tokenizer, config.control_dim)
    run.check_data(data.record)
    counts = check_enough_tokens(data, Pos.size)
    if data.control is not None:
        check_some_control(data.build_caches("train").values(), data.control)
    tokenizer, template = data.the_tokenizer, data.template
    if template is not None and template != tokenizer.chat_template:
        keep_template(template, run.directory.tokenizer)
    with trainer.use_device_mesh():
        try:
            train = data.train_set(Pos, trainer.batch_schedule, key=key)
        # Such as max_train_batches beyond the end of a component.
        except (AssertionError, ValueError, ArithmeticError) as error:
            raise UserError(f"the training set of `data` cannot be made: {error}") from error
        _check_lasts(train, trainer)
        validation = data.tagged_eval_sets(Pos)
    tokens, unigram = sum(counts.train.values()), _unigram(data, number_of_ids(tokenizer))
    return Corpus(tokenizer, train, validation, tokens, _sequences(data, counts, Pos), unigram)


def _check_lasts(train: AsyncDataset, trainer: TrainerConfig) -> None:
    """Raises:
    UserError: the training set ends before the training.
    """
    if not train.is_finite():
        return
    length, batches = len(train.as_sync_dataset()), trainer.batch_schedule
    if batches.global_data_offset_by_step(trainer.num_train_steps - 1) >= length:
        raise UserError(
            f"`trainer.num_train_steps` is {trainer.num_train_steps}, but with this `data.stop_strategy` the {length}"
            f" training sequences end after {batches.find_step_containing_offset(length - 1) + 1} steps. Train for so"
            " many, or set data.stop_strategy to restart"
        )


def _sequences(data: LmDataConfig, counts: TokenCounts, Pos: Axis) -> int | None:
    """Sequences in an epoch of a single text that is cut into sequences without gaps."""
    component = next(iter(data.components.values()))
    if len(data.components) > 1 or not isinstance(component, DatasetComponent) or not is_stream(component):
        return None
    held_out = sum((data.num_validation_sequences or {}).values())
    return max(1, sum(counts.train.values()) // Pos.size - held_out)


def _unigram(data: LmDataConfig, vocab_size: int) -> float | None:
    def counts(split: str) -> np.ndarray:
        found = np.zeros(vocab_size, np.int64)
        for name, cache in data.build_caches(split).items():
            try:
                found += token_counts([cache], vocab_size, field=component_of(data, name).format.token_data_key)
            except UserError as error:
                raise UserError(f"component {name!r}: {error}") from None
        return found

    train = counts("train")
    if data.num_validation_sequences:  # their losses are those of sequences of the training text
        return None
    validation = counts("validation")
    return unigram_entropy(train, validation).nats_per_token if validation.any() else None
