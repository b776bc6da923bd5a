"""Levanter's data configuration after resolving: the same, but its token caches are built safely and carry control."""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from haliax import Axis
from jaxtyping import PRNGKeyArray
from levanter.data import AsyncDataset, MixtureDataset
from levanter.data.text import (
    ChatLmDatasetFormat,
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    LmDataConfig,
    NamedLmDataset,
)
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer

from qkvflow.data.cache import load_or_build
from qkvflow.data.checks import is_trained_on
from qkvflow.data.control.field import ControlField
from qkvflow.data.control.sequences import ControlledDataset, with_sequence_controls
from qkvflow.data.formats import unmasked
from qkvflow.data.sequences import Sequences, without_examples
from qkvflow.data.tokenizers import load_tokenizer
from qkvflow.errors import Notice, UserError, first_line


@dataclass(frozen=True)
class ResolvedDataConfig(LmDataConfig):
    """The result of `DataConfig.resolve`: an `LmDataConfig` whose caches are complete or absent.

    Each process of a run may call `build_caches`: a lock lets one process build while the others wait.
    With `control` its training and validation sets yield `ControlledExample`, otherwise Levanter's `LmExample`.
    """

    control: ControlField | None = None
    record: Mapping[str, str] = field(default_factory=dict)
    """Identifies the data, file by file; see `source_record`. A run records it and compares it later."""
    rebuild_caches: bool = False
    verify_caches: bool = False

    @cached_property
    def the_tokenizer(self) -> MarinTokenizer:
        return load_tokenizer(Path(self.tokenizer))

    @property
    def template(self) -> str | None:
        """The chat template that a run keeps: `chat_template`, or else the one that all components with chats name.
        None: the tokenizer keeps its own."""
        if self.chat_template is not None:
            return self.chat_template
        formats = (component.format for _, component in datasets(self.components))
        named = {format.chat_template for format in formats if isinstance(format, ChatLmDatasetFormat)}
        return named.pop() if len(named) == 1 else None

    def train_set(self, Pos: Axis, batch_schedule: BatchSchedule, *, key: PRNGKeyArray) -> AsyncDataset[LmExample]:
        named = super().train_set(Pos, batch_schedule, key=key)
        assert isinstance(named, NamedLmDataset)
        assert isinstance(named.dataset, MixtureDataset)
        for name, sequences in named.dataset.datasets.items():
            if sequences.is_finite() and not len(sequences.as_sync_dataset()):
                raise UserError(
                    f"component {name!r} has no sequence of {Pos.size} tokens left for training, after what"
                    " `num_validation_sequences` and `max_train_batches` take, or a budget. Give more text, or let them"
                    " take less"
                )
        return self._examples(named, Pos)

    def validation_sets(self, Pos: Axis) -> Mapping[str, AsyncDataset[LmExample]]:
        return {name: self._examples(named, Pos) for name, named in super().validation_sets(Pos).items()}

    def _examples(self, named: NamedLmDataset, Pos: Axis) -> AsyncDataset[LmExample]:
        sequences = Sequences(
            named.dataset,
            Pos,
            eos_id=self.the_tokenizer.eos_token_id,
            block_cross_document_attention=self.block_cross_document_attention,
        )
        return sequences if self.control is None else ControlledDataset(named.dataset, sequences.fn)

    def build_token_datasets(self, caches: Mapping[str, TreeCache[dict]], Pos: Axis, *, split: str):
        datasets = super().build_token_datasets(caches, Pos, split=split)
        datasets = {name: without_examples(dataset) for name, dataset in datasets.items()}
        if self.control is None:
            return datasets
        dim = self.control.dim
        return {name: with_sequence_controls(name, ds, caches, Pos, dim) for name, ds in datasets.items()}

    def build_caches(self, split: str) -> dict[str, TreeCache[dict]]:
        caches: dict[str, TreeCache[dict]] = {}
        left_to_levanter = dict(self.components)
        for name, component in self.components.items():
            if split == "train" and not is_trained_on(self, name):
                del left_to_levanter[name]
                continue
            own = [*_parts(name, component)]
            if not own:
                continue
            del left_to_levanter[name]
            for part_name, part in own:
                try:
                    format = unmasked(part.format, self.the_tokenizer)
                    processor = format.build_preprocessor(self.the_tokenizer, enforce_eos=self.enforce_eos)
                except UserError:
                    raise
                except ValueError as error:  # a chat without a template, for example
                    raise UserError(f"the format of component {part_name!r} cannot be used: {error}") from error
                cache = load_or_build(
                    Path(part.cache_dir or ""),
                    split,
                    part.source,
                    processor,
                    self.cache_options,
                    build=self.auto_build_caches,
                    rebuild=self.rebuild_caches,
                    verify=self.verify_caches,
                )
                if cache is not None:
                    caches[part_name] = cache
        if left_to_levanter:
            self._tell_what_is_not_compared(left_to_levanter)
            rest = dataclasses.replace(self, components=left_to_levanter, train_weights=None)
            try:
                caches |= LmDataConfig.build_caches(rest, split)
            except UserError:
                raise
            except ValueError as error:  # without a source there must be a cache
                names = ", ".join(left_to_levanter)
                raise UserError(f"the tokens of component {names} cannot be read: {first_line(error)}") from error
        return caches

    def _tell_what_is_not_compared(self, names: Iterable[str]) -> None:
        asked = [f"data.{name}" for name in ("rebuild_caches", "verify_caches") if getattr(self, name)]
        if asked:
            text = (
                f"{', '.join(asked)}: no effect for component {', '.join(names)}. Caches in a bucket, and those of"
                " components without a source, are not compared with checksums."
            )
            warnings.warn(Notice(text), stacklevel=2)


def _parts(name: str, component: object) -> Iterator[tuple[str, DatasetComponent]]:
    """The parts of a component that have a cache, with source and local cache folder: all or none of them."""
    if isinstance(component, DatasetComponent):
        parts = [(name, component)]
    elif isinstance(component, ConcatDatasetComponent):
        parts = [(f"{name}/{child_name}", child) for child_name, child in component.children.items()]
    else:
        return
    # Levanter handles components without a source, or with a cache on an object store.
    if all(
        part.source is not None and not part.flat_cache and part.cache_dir and "://" not in part.cache_dir
        for _, part in parts
    ):
        yield from parts


def datasets(components: Mapping[str, DatasetComponentBase]) -> Iterator[tuple[str, DatasetComponent]]:
    """The components with data of their own, by name; `parent/child` for the parts of joined ones."""
    for name, component in components.items():
        if isinstance(component, ConcatDatasetComponent):
            yield from datasets({f"{name}/{child}": part for child, part in component.children.items()})
        elif isinstance(component, DatasetComponent):
            yield name, component
