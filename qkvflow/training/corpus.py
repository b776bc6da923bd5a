"""The text of a run, ready to train on: Levanter's datasets, tokenizer, unigram entropy to beat."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from haliax import Axis
from levanter.data import AsyncDataset
from levanter.data.text import LmDataConfig
from levanter.tokenizers import MarinTokenizer
from levanter.trainer import TrainerConfig

from qkvflow.data import check_enough_tokens
from qkvflow.data.controlled import check_some_control
from qkvflow.data.statistics import token_counts, unigram_entropy
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.training.checks import control_dim


@dataclass(frozen=True)
class Corpus:
    """
    tokenizer: of the run.
    train: Levanter's training set of sequences.
    validation: Levanter's tagged validation sets; may be empty.
    train_tokens: size of the training text.
    unigram: cross-entropy of the validation text under single-token frequencies of the training text, in nats
        per token: what a model reaches that knows no context. None without validation text.
    """

    tokenizer: MarinTokenizer
    train: AsyncDataset
    validation: Sequence[tuple[AsyncDataset, Sequence[str]]]
    train_tokens: int
    unigram: float | None


def open_corpus(
    config: TrainConfig, directory: RunDirectory, trainer: TrainerConfig, Pos: Axis, key: jax.Array
) -> Corpus:
    """Builds or opens the token caches.

    Args:
        Pos: axis of one training sequence.
        key: of the order in which sequences are drawn.

    Errors: `UserError` for text that is missing, unreadable or shorter than one sequence, and for controls that
    are wrong or nowhere.
    """
    data = config.data.resolve(directory.tokenizer, control_dim(config))
    counts = check_enough_tokens(data, Pos.size)
    if data.control is not None:
        check_some_control(data.build_caches("train").values(), data.control)
    tokenizer = data.the_tokenizer
    with trainer.use_device_mesh():
        train = data.train_set(Pos, trainer.batch_schedule, key=key)
        validation = data.tagged_eval_sets(Pos)
    return Corpus(tokenizer, train, validation, sum(counts.train.values()), _unigram(data, len(tokenizer)))


def _unigram(data: LmDataConfig, vocab_size: int) -> float | None:
    train, validation = (
        token_counts(data.build_caches(split).values(), vocab_size) for split in ("train", "validation")
    )
    return unigram_entropy(train, validation).nats_per_token if validation.any() else None
