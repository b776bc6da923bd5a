"""Two kinds of `source` for Levanter's data components: `type: files` and `type: builtin`."""

import copy
import dataclasses
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from levanter.data.sharded_datasource import ShardedDataSource
from levanter.data.text import LmDatasetSourceConfigBase

from qkvflow.data.builtin import BUILTIN_TEXTS, documents_of
from qkvflow.data.holdout import record_hash, record_threshold, text_boundary
from qkvflow.data.pieces import PIECE_CHARACTERS
from qkvflow.data.readers import ENDINGS, is_plain_text, read_records, read_text
from qkvflow.errors import UserError
from qkvflow.files import local_path
from qkvflow.ranges import ProperShare, check_ranges


@LmDatasetSourceConfigBase.register_subclass("files")
@dataclass(frozen=True)
class FilesSource(LmDatasetSourceConfigBase):
    """Local files: .txt (one document per file), .jsonl (.gz, .zst), .json, .parquet (one document per record).

    Without `validation`, `validation_fraction` of the training data is held out: of records, whole documents chosen by
    a hash of what their format reads (equal documents stay together); of each .txt, its last part, cut at a line end.
    Train and validation are disjoint and together contain all data.
    """

    train: list[str] = field(default_factory=list)
    """Paths or globs (`*`, `?`, `[...]`, `**`)."""
    validation: list[str] = field(default_factory=list)
    validation_fraction: ProperShare = 0.0
    text_key: str | None = "text"
    """The key of a record that holds its text. None: whole records, for formats other than text."""
    whole_texts: ClassVar[bool] = False
    """Whether a .txt is one record, as packing needs it, instead of pieces of a stream; see `with_whole_texts`."""

    read_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of whole records that their format reads; empty if not known. See `reading`."""

    def __post_init__(self):
        check_ranges(self)
        if self.validation and self.validation_fraction > 0:
            raise UserError(
                "validation files and a validation_fraction are both given, but the fraction is only used if there are"
                " no validation files. Leave one of them out."
            )

    def check(self) -> None:
        """Checks every file before any work.

        Raises:
            UserError: no or missing files, folders, empty files, unsupported extensions, a file in both splits, or a
                first record without text.
        """
        if not self.train and not self.validation:
            raise UserError("a source of type `files` needs files: give `train` a path or a list of paths")
        train, validation = self.files("train"), self.files("validation")
        for path in (*train, *validation):
            _check_file(path)
            readable = read_text(path, "text") if is_plain_text(path) else self.records(path)
            if next(readable, None) is None:
                raise UserError(f"the data file {path} contains no text and no records")
        shared = {path.resolve() for path in train} & {path.resolve() for path in validation}
        if shared:
            raise UserError(f"{min(shared)} is given both for training and for validation; remove it from one")

    def files(self, split: str) -> list[Path]:
        """The files given for a split: globs expanded, each once, in the order in which they are named first."""
        patterns = {"train": self.train, "validation": self.validation}.get(split)
        if patterns is None:
            raise ValueError(f"Unknown split {split}")
        found: dict[Path, Path] = {}
        for path in (path for pattern in patterns for path in _expand(pattern)):
            found.setdefault(path.resolve(), path)
        return list(found.values())

    def records(self, path: Path) -> Iterator[dict[str, Any]]:
        """The records of a file that is not plain text."""
        return read_records(path, self.text_key)

    def with_whole_texts(self) -> "FilesSource":
        """The source that reads each .txt as one record; itself if none is so long that this makes a difference."""
        texts = [path for split in ("train", "validation") for path in self.files(split) if is_plain_text(path)]
        if all(path.stat().st_size <= PIECE_CHARACTERS for path in texts):
            return self
        whole = copy.copy(self)
        object.__setattr__(whole, "whole_texts", True)
        return whole

    def reading(self, keys: tuple[str, ...]) -> "FilesSource":
        """The source of whole records, for a format that reads only these keys: the split depends on no others."""
        whole = dataclasses.replace(self, text_key=None)
        object.__setattr__(whole, "read_keys", keys)
        return whole

    def get_shard_source(self, split: str) -> ShardedDataSource[dict] | None:
        if split == "validation" and not self.validation:
            if not self.validation_fraction or not self.train:
                return None
            return FilesDataSource(self, self.files("train"), held_out=True)
        files = self.files(split)
        if not files:
            return None
        return FilesDataSource(self, files, held_out=False)


class FilesDataSource(ShardedDataSource[dict]):
    """One shard per file: its part of one split, as records."""

    def __init__(self, source: FilesSource, files: list[Path], *, held_out: bool):
        self.source = source
        self.text_key = source.text_key
        self.fraction = source.validation_fraction
        self.held_out = held_out
        self._files = {f"{index:05d}_{path.name}": path for index, path in enumerate(files)}

    @property
    def shard_names(self) -> Sequence[str]:
        return list(self._files)

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, Any]]:
        return islice(self._records(self._files[shard_name]), row, None)

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        if is_plain_text(path):
            start, stop = 0, None
            if self.fraction:
                boundary = text_boundary(path, self.fraction)
                start, stop = (boundary, None) if self.held_out else (0, boundary)
            yield from read_text(path, self.text_key or "text", start, stop, whole=self.source.whole_texts)
        elif not self.fraction:
            yield from self.source.records(path)
        else:
            record_files = tuple(file for file in self._files.values() if not is_plain_text(file))
            read_keys = self.source.read_keys
            threshold = record_threshold(record_files, self.text_key, self.fraction, read_keys)
            for record in self.source.records(path):
                if (record_hash(record, self.text_key, read_keys) <= threshold) == self.held_out:
                    yield record


@LmDatasetSourceConfigBase.register_subclass("builtin")
@dataclass(frozen=True)
class BuiltinSource(LmDatasetSourceConfigBase):
    """Text that ships with Python, about a tenth of it for validation.

    Attributes:
        text: `topics`, the English text of Python's help, about 465 kB; `library`, the source of the standard library
            without tests, about 11 MB.
    """

    text: str = "topics"

    def __post_init__(self):
        if self.text not in BUILTIN_TEXTS:
            raise UserError(f"text: {self.text!r} is not known. Choices: {', '.join(BUILTIN_TEXTS)}.")

    def documents(self, split: str) -> Iterator[str]:
        """The documents of the split `train` or `validation`."""
        return documents_of(self.text, split)

    def get_shard_source(self, split: str) -> ShardedDataSource[dict] | None:
        return BuiltinDataSource(self, split)


class BuiltinDataSource(ShardedDataSource[dict]):
    """One shard; one record per document."""

    def __init__(self, source: BuiltinSource, split: str):
        self.source = source
        self.split = split

    @property
    def shard_names(self) -> Sequence[str]:
        return [self.source.text]

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, Any]]:
        return islice(({"text": text} for text in self.source.documents(self.split)), row, None)


def _expand(pattern: str) -> list[Path]:
    if "://" in pattern:
        raise UserError(
            f"{pattern!r} is not a local path; for remote files use a source of `type: url` with `train_urls` and"
            " `validation_urls`, or `type: hf` for a Hugging Face data set"
        )
    path = local_path(pattern)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise UserError(f"no file matches {pattern!r} (current folder: {Path.cwd()})")
    return found


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder; give its files, for example {str(path / '*.txt')!r}")
    if not path.is_file():
        raise UserError(f"the data file {path} does not exist (current folder: {Path.cwd()})")
    if not path.name.lower().endswith(ENDINGS):
        raise UserError(
            f"{path}: the file extension {path.suffix!r} is not supported; supported are {', '.join(ENDINGS)}"
        )
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error
    if path.stat().st_size == 0:
        raise UserError(f"the data file {path} is empty")
