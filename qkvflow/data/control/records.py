"""Data components whose records carry a control: the source keeps it, the token cache stores it per document.

A row of the cache is a document: `input_ids` int32 [tokens], and one `control` fp32 [dim] for all its tokens.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from levanter.data import BatchProcessor
from levanter.data.text import DatasetComponent, DatasetComponentBase, LmDatasetSourceConfigBase, TextLmDatasetFormat
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer

from qkvflow.axes import CONTROL
from qkvflow.data.control.field import ControlField
from qkvflow.data.readers import is_plain_text, read_records
from qkvflow.data.sources import BuiltinSource, FilesSource
from qkvflow.errors import UserError


def with_control(name: str, component: DatasetComponentBase, control: ControlField) -> DatasetComponent:
    """The component, with its records read and tokenized together with their control.

    Raises:
        UserError: data without records (built-in text, plain text, existing caches), or a format that is not running
            text.
    """
    setting = f"`data.control_key: {control.key}` needs records"
    if not isinstance(component, DatasetComponent) or component.source is None or component.flat_cache:
        raise UserError(f"component {name!r}: {setting}, but it has a token cache made elsewhere. Give it a source.")
    source, format = component.source, component.format
    if isinstance(source, BuiltinSource):
        raise UserError(f"component {name!r}: {setting}, but the built-in text has none. Give files with `data.train`.")
    if not isinstance(format, TextLmDatasetFormat) or component.pack:
        raise UserError(
            f"component {name!r}: {setting} of text documents that follow each other in the token stream; it has the"
            f" format {type(format).__name__} with pack {component.pack!r}. Leave `format` and `pack` out, or the"
            " control."
        )
    if control.key == format.text_key:
        raise UserError(f"component {name!r}: the key {control.key!r} is given both for the text and for the control")
    if isinstance(source, FilesSource):
        source = ControlledFilesSource(**_fields(source), control=control)
    format = ControlledFormat(text_key=format.text_key, text=format, control=control)
    return dataclasses.replace(component, source=source, format=format)


def check_some_control(caches: Iterable[TreeCache[dict]], control: ControlField) -> None:
    """Checks that there is a document with a control.

    Raises:
        UserError: no document of any of the `caches` has a control: the key is misspelt, or the data has no controls.
    """
    if not any(control_table(cache, control.dim).any() for cache in caches):
        raise UserError(
            f"no record of the training data has a control under the key {control.key!r} (`data.control_key`), or all"
            " are zero. Name the right key, or set `data.control_key` to null to train without control."
        )


def control_table(cache: TreeCache[dict], dim: int) -> np.ndarray:
    """fp32 [documents, dim]: the control of each document of a cache, in the order of their tokens."""
    rows = len(cache)
    if rows == 0:
        return np.zeros((0, dim), dtype=np.float32)
    return np.asarray(cache.jagged_array_tree()[CONTROL].data[: rows * dim].read().result()).reshape(rows, dim)


@dataclass(frozen=True)
class ControlledFilesSource(FilesSource):
    """Local files whose records keep their control. It is checked on reading: errors name file and line."""

    control: ControlField = dataclasses.field(kw_only=True)

    def check(self) -> None:
        for split in ("train", "validation"):
            for path in filter(is_plain_text, self.files(split)):
                raise UserError(
                    f"{path}: a plain text file has no records with {self.control.key!r} (`data.control_key`). Give"
                    " .jsonl, .json or .parquet files, or leave `data.control_key` out."
                )
        super().check()

    def records(self, path: Path) -> Iterator[dict[str, Any]]:
        return read_records(path, self.text_key, self.control)


@dataclass(frozen=True)
class ControlledFormat(TextLmDatasetFormat):
    """The format `text`, with the control of each record stored with its tokens."""

    text: TextLmDatasetFormat = dataclasses.field(kw_only=True)
    control: ControlField = dataclasses.field(kw_only=True)

    def build_preprocessor(
        self, tokenizer: MarinTokenizer, *, enforce_eos: bool = True, enforce_bos: bool = True
    ) -> BatchProcessor[dict, dict]:
        text = self.text.build_preprocessor(tokenizer, enforce_eos=enforce_eos, enforce_bos=enforce_bos)
        return ControlledTokenizer(text, self.text_key, self.control)


class ControlledTokenizer(BatchProcessor[dict, dict]):
    """Records to `{"input_ids": int32 [tokens], "control": fp32 [dim]}`."""

    def __init__(self, text: BatchProcessor[dict, dict], text_key: str, control: ControlField):
        self.text = text
        self.text_key = text_key
        self.control = control

    def __call__(self, batch: Sequence[dict]) -> Sequence[dict]:
        return [
            {**row, CONTROL: self.control.read(record, f"the record {record[self.text_key]!r:.60}")}
            for row, record in zip(self.text(batch), batch, strict=True)
        ]

    @property
    def output_exemplar(self) -> dict[str, Any]:
        return {**self.text.output_exemplar, CONTROL: np.zeros((0,), dtype=np.float32)}

    @property
    def num_cpus(self) -> int:
        return self.text.num_cpus

    @property
    def metadata(self) -> dict[str, Any]:
        return {**self.text.metadata, "control_key": self.control.key, "control_dim": self.control.dim}


def _fields(source: LmDatasetSourceConfigBase) -> Mapping[str, Any]:
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
