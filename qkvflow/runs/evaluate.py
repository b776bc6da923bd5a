"""Validation loss of any language model on the text of a run, or another text, by Levanter's evaluator."""

import dataclasses
import itertools
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import set_mesh
from levanter.data import DataLoader
from levanter.eval import TaggedEvaluator
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.utils.tree_utils import inference_mode

from qkvflow.axes import BATCH
from qkvflow.config import decode, encode
from qkvflow.data import DataConfig, check_enough_tokens
from qkvflow.errors import Notice, UserError
from qkvflow.named import map_named
from qkvflow.runs import data_record
from qkvflow.runs.load import Run


def on_other_text(run: Run, keys: Mapping[str, Any]) -> Run:
    """The run with other keys of its `data`. `validation` alone is the text to evaluate on, whatever the run had.

    Raises:
        UserError: a key that there is not, a wrong value, or another tokenizer.
    """
    if "tokenizer" in keys:
        raise UserError(
            "`data.tokenizer` must be that of the run, whose embeddings have no meaning for other tokens. Leave it out"
        )
    stored = run.config.data
    if "validation" in keys and not {"train", "components"} & set(keys):
        kind = typing.get_type_hints(type(stored))["validation"]
        files = decode(kind, keys["validation"], "data.validation")
        rest = {key: value for key, value in keys.items() if key != "validation"}
        data = decode(type(stored), encode(stored) | rest, "data")
        data = data.evaluating(files) if files is not None else data
    elif "components" in keys:
        data = _with_components(stored, keys)
    else:
        data = decode(type(stored), encode(stored) | dict(keys), "data")
    return dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))


def _with_components(stored: DataConfig, keys: Mapping[str, Any]) -> DataConfig:
    """What a run says of its own components, such as their weights, does not hold for others."""
    own, encoded = ("train_weights", "max_train_batches", "num_validation_sequences"), encode(stored)
    if keys.get("train", stored.train) is None:  # how that is read says nothing of components
        encoded |= {"text_key": DataConfig.text_key, "validation_fraction": DataConfig.validation_fraction}
    data = decode(type(stored), encoded | dict.fromkeys(own) | dict(keys), "data")
    if set(data.components) == set(stored.components):
        return decode(type(stored), encoded | dict(keys), "data")
    if "train_weights" in keys:
        return data
    return dataclasses.replace(data, train_weights=dict.fromkeys(data.components, 0.0))


def _tell_what_has_changed(run: Run, record: Mapping[str, str]) -> None:
    """A file that was edited is divided elsewhere: what is held out now, the model may have been trained on."""
    changes = data_record.changes(run.directory.data, record)
    edited = [name for name, (old, new) in changes.items() if old is not None and new is not None and old != new]
    if edited:
        text = (
            f"{edited[0]} has changed since {run.directory} was trained on it, so the model may have seen what is held"
            " out of it now. Restore it, or evaluate on another text: --data.validation FILE"
        )
        warnings.warn(Notice(text), stacklevel=3)


class RunEvaluator:
    """Evaluates models on the validation sets of a run; on all devices of this machine, whatever it trained on."""

    def __init__(self, run: Run, batch_size: int | None = None, max_batches: int | None = None):
        """
        Args:
            run: its data and sequence length; the model to evaluate is given later.
            batch_size: sequences at a time; as in training by default.
            max_batches: of each validation set; all by default.

        Raises:
            UserError: the run has no validation text.
        """
        config = run.config
        size = batch_size or max(1, config.trainer.batch_schedule.batch_size_at_step(0))
        self.Pos = config.Pos
        data = config.data.resolve(run.directory.tokenizer, config.control_dim, is_training=False)
        _tell_what_has_changed(run, data.record)
        check_enough_tokens(data, self.Pos.size, is_training=False)
        with set_mesh(TrainerConfig().device_mesh):
            self._sets = data.tagged_eval_sets(self.Pos)
        if not self._sets:
            raise UserError(
                f"the run {run.directory} has no validation text: set data.validation or data.validation_fraction"
            )
        # More than there are would be filled up with nothing.
        size = min(size, max(len(found.as_sync_dataset()) for found, _ in self._sets))
        size = -(-size // jax.device_count()) * jax.device_count()
        self.Batch = Axis(BATCH, size)
        self._trainer = TrainerConfig(train_batch_size=size)
        self._limit = None if max_batches is None else max_batches * size
        self._mp = config.trainer.mp

    def loss(self, model: LmHeadModel) -> float:
        """Mean over all tokens of all validation sets, nats per token; in the precision of the run, without dropout."""
        mapping = self._trainer.compute_axis_mapping

        def per_token(model, batch):
            model = self._mp.cast_to_compute(model)
            losses = model.compute_next_token_loss(batch, reduction=None, reduction_axis=())
            targets = hax.roll(batch.tokens, -1, self.Pos)
            return losses.array, batch.loss_weight.array, targets.array

        evaluator = TaggedEvaluator(
            EvalBatch=self.Batch,
            tagged_eval_sets=self._sets,
            loss_fn=per_token,
            device_mesh=self._trainer.device_mesh,
            axis_mapping=mapping,
            max_examples_per_dataset=self._limit,
        )
        with set_mesh(self._trainer.device_mesh), hax.axis_mapping(mapping):
            return float(evaluator.evaluate(inference_mode(model, True)).micro_avg_loss)

    def example(self) -> LmExample:
        """The first batch of the first validation set, without what the batch is filled up with."""
        first, count = next(self.examples()), len(self._sets[0][0].as_sync_dataset())

        def cut(a: NamedArray) -> NamedArray:
            return a[BATCH, :count] if a.has_axis(BATCH) else a

        return first if count >= self.Batch.size else map_named(cut, first)

    def examples(self) -> Iterator[LmExample]:
        """All batches that `loss` reads."""
        for dataset, _ in self._sets:
            with set_mesh(self._trainer.device_mesh):
                loader = DataLoader(
                    dataset,
                    batch_size=self.Batch.size,
                    mesh=self._trainer.device_mesh,
                    axis_resources=self._trainer.compute_axis_mapping,
                    batch_axis_name=BATCH,
                )
                batches = iter(loader)
            yield from itertools.islice(batches, None if self._limit is None else self._limit // self.Batch.size)


def relative_displacement(x0: NamedArray, x1: NamedArray) -> float:
    """||x1 - x0|| / ||x0|| over all axes: how far the flow carries its state. 0 means that it does nothing."""
    moved, start = (jnp.sqrt(jnp.sum(jnp.square(x.array.astype(jnp.float32)))) for x in (x1 - x0, x0))
    return float(moved / start)
