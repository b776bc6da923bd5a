"""The start of a training run: a randomly initialised model, or a base to fine-tune."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from haliax.partitioning import ResourceMapping
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import make_floating_point_trainable_filter
from levanter.utils.tree_utils import inference_mode
from levanter.utils.types import FilterTree

from qkvflow.config import decode, read_config
from qkvflow.data import copy_tokenizer
from qkvflow.models import lora
from qkvflow.named import is_named
from qkvflow.places import Place
from qkvflow.runs.base import Base, BaseRecord
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.load import load_base, stored_config, with_local_tokenizer
from qkvflow.runs.modes import FinetuneMode
from qkvflow.runs.prepare import PreparedRun
from qkvflow.training.checks import model_shape


@dataclass(frozen=True)
class Start(abc.ABC):
    """
    Attributes:
        model: configuration of the model that is trained.
        directory: of the run.
    """

    model: Any
    directory: RunDirectory

    @property
    def is_finetune(self) -> bool:
        """Whether the model can do something before the first step, which is then measured."""
        return False

    def shape(self, Vocab: Axis) -> eqx.Module:
        """The model's shapes.

        Raises:
            UserError: it cannot be built.
        """
        return model_shape(self.local_model, Vocab)

    @abc.abstractmethod
    def fresh(self, Vocab: Axis, mapping: ResourceMapping, *, key: jax.Array) -> LmHeadModel:
        """The model before the first step, sharded."""

    def continued(self, mapping: ResourceMapping, *, key: jax.Array) -> LmHeadModel | None:
        """For a run that is continued: the model with what its checkpoint does not hold; None if it holds all."""
        return None

    def trainable(self, model: eqx.Module) -> FilterTree:
        """Which arrays of the model are trained, as Levanter's filter."""
        return True

    def in_step(self, model: LmHeadModel, key: jax.Array | None) -> LmHeadModel:
        """The model as the loss of a training step sees it; `key` is that of the step."""
        return model

    @property
    def local_model(self) -> Any:
        """The configuration, with the run's own tokenizer where it names one."""
        return with_local_tokenizer(self.model, self.directory.tokenizer)


@dataclass(frozen=True)
class FromScratch(Start):
    """A model whose parameters are drawn at random."""

    @classmethod
    def of(cls, run: PreparedRun[TrainConfig]) -> "FromScratch":
        """That of an opened run directory."""
        return cls(run.config.model, run.directory)

    def fresh(self, Vocab: Axis, mapping: ResourceMapping, *, key: jax.Array) -> LmHeadModel:
        return _draw(lambda: self.local_model.build(Vocab, key=key), mapping)


@dataclass(frozen=True)
class RecordedBase(Base):
    """The base of a run as the run itself tells it: its shapes are known even where it is gone.

    Attributes:
        directory: of the run.
        step: of the base's checkpoint; None for an official one.
    """

    directory: RunDirectory
    step: int | None

    @classmethod
    def of(cls, directory: RunDirectory, record: BaseRecord) -> "RecordedBase":
        """What a run that has begun tells of its base, `record`."""
        config = stored_config(directory)
        assert config.vocab_size is not None  # `commit` has written it
        tokenizer = (directory.tokenizer, str(config.data.tokenizer))
        path, model = Place.of(record.path), decode(LmConfig, record.model)
        return cls(path, model, Axis("vocab", config.vocab_size), tokenizer, directory, record.checkpoint_step)

    def load(self) -> LmHeadModel:
        return load_base(self.directory)

    @property
    def checkpoint_step(self) -> int | None:
        return self.step


@dataclass(frozen=True)
class FromBase(Start):
    """A base, adapted by a mode of fine-tuning."""

    base: Base
    mode: FinetuneMode

    @classmethod
    def of(cls, run: PreparedRun[FinetuneConfig], base: Base, mode: FinetuneMode) -> "FromBase":
        """That of an opened run directory, which gets the tokenizer of the base."""
        if base.tokenizer is not None:
            copy_tokenizer(base.tokenizer[0], run.directory.tokenizer, base.tokenizer[1])
        return cls(run.config.model, run.directory, base, mode)

    @property
    def is_finetune(self) -> bool:
        return True

    def shape(self, Vocab: Axis) -> eqx.Module:
        return adapted_shape(self.base, self.mode, self.model)

    def fresh(self, Vocab: Axis, mapping: ResourceMapping, *, key: jax.Array) -> LmHeadModel:
        """Also writes down what the base is, and keeps it: the run needs it to go on."""
        self.base.keep()
        loaded = self.base.load()
        self.base.record(self.directory, loaded).write(self.directory)
        return self._adapt(loaded, mapping, key)

    def continued(self, mapping: ResourceMapping, *, key: jax.Array) -> LmHeadModel | None:
        return None if self.mode.stores_base else self._adapt(load_base(self.directory), mapping, key)

    def trainable(self, model: eqx.Module) -> FilterTree:
        return self.mode.trainable(model)

    def in_step(self, model: LmHeadModel, key: jax.Array | None) -> LmHeadModel:
        model = _freeze(model, self.trainable(model))
        return model if key is None else lora.draw_dropout(model, jax.random.fold_in(key, 0))

    def _adapt(self, loaded: LmHeadModel, mapping: ResourceMapping, key: jax.Array) -> LmHeadModel:
        return hax.shard(inference_mode(self.mode.adapt(loaded, self.model, key=key), False), mapping)


def start_of(directory: RunDirectory) -> tuple[TrainConfig, Start]:
    """The configuration of a run, and where its model came from."""
    record = BaseRecord.read(directory)
    if record is None:
        config = stored_config(directory)
        return config, FromScratch(config.model, directory)
    config = read_config(directory.config, FinetuneConfig)
    assert config.mode is not None
    return config, FromBase(config.model, directory, RecordedBase.of(directory, record), config.mode)


def adapted_shape(base: Base, mode: FinetuneMode, model: Any) -> eqx.Module:
    """The shapes of a base that is adapted to be a `model`.

    Raises:
        UserError: it cannot be: times that per-layer weights do not have, LoRA targets that match nothing.
    """
    config = base.model if base.tokenizer is None else with_local_tokenizer(base.model, base.tokenizer[0])
    shape = model_shape(config, base.Vocab)
    return eqx.filter_eval_shape(lambda m: mode.adapt(m, model, key=jax.random.PRNGKey(0)), shape)


def _freeze(model: LmHeadModel, trainable: FilterTree) -> LmHeadModel:
    """The same model, through whose frozen arrays no gradient passes.

    Levanter asks for the gradient of every array and drops those of frozen ones afterwards.
    """
    if trainable is True:
        return model
    trained, frozen = eqx.partition(model, make_floating_point_trainable_filter(trainable), is_leaf=is_named)
    frozen = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, frozen)
    return eqx.combine(trained, frozen, is_leaf=is_named)


def _draw(build_model: Callable[[], LmHeadModel], mapping: ResourceMapping) -> LmHeadModel:
    """The initial model, sharded.

    Differs from Levanter, which compiles this together with the optimizer's state at full effort: most of the
    time to the first step then goes into random numbers that are drawn once.
    """
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None

    def arrays():
        return eqx.filter(hax.shard(build_model(), mapping), eqx.is_array)

    shape = eqx.filter_eval_shape(build_model)
    static = eqx.filter(shape, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(jax.jit(arrays, compiler_options=options)(), static)
