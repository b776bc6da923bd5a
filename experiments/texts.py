"""YAML `text:`, the text of a study, in three files: for training, for selection, and for the report, used once.

It is WikiText-2, TinyShakespeare, a dataset from the hub, files, or a text that ships with Python.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import draccus
from levanter.data.text import HfDatasetSourceConfig

from qkvflow.data.builtin import documents_of
from qkvflow.data.cache import open_source
from qkvflow.errors import UserError
from qkvflow.files import write_text
from qkvflow.locks import locked

PARTS = ("train", "select", "report")


@dataclass(frozen=True)
class Text:
    """One text as the files `train.txt`, `select.txt` and `report.txt` of a folder."""

    name: str
    folder: Path

    def file(self, part: str) -> str:
        return str((self.folder / f"{part}.txt").resolve())

    def read(self, part: str) -> str:
        return _kept(Path(self.file(part)))

    def sizes(self) -> dict[str, int]:
        """Bytes of each part."""
        return {part: Path(self.file(part)).stat().st_size for part in PARTS}

    def hash(self, part: str) -> str:
        """sha256 (hex) of a part."""
        path = Path(self.file(part))
        return _hash(path, path.stat().st_mtime_ns)


class TextConfig(draccus.ChoiceRegistry, abc.ABC):
    """The source of the text. title: of the text, and of its folder. origins: description of each of PARTS."""

    title: str
    origins: tuple[str, ...]

    @abc.abstractmethod
    def contents(self) -> tuple[str, ...]:
        """The content of each of PARTS."""

    @property
    def parts(self) -> dict[str, str]:
        return dict(zip(PARTS, self.origins, strict=True))

    def prepare(self, folder: Path) -> Text:
        """The text in files below `folder`.

        Raises:
            UserError: it does not exist, two of its parts are the same, or another text of this title is there, which
                trainings may be reading.
        """
        text, contents = Text(self.title, folder / self.title), self.contents()
        if len(set(contents)) < len(contents):
            origins = "{}, {} and {}".format(*self.origins)
            raise UserError(
                f"the texts of {self.title!r} to train on, to select by and to report on must differ, but two of"
                f" {origins} have the same content"
            )
        files = {Path(text.file(part)): content for part, content in zip(PARTS, contents, strict=True)}
        text.folder.mkdir(parents=True, exist_ok=True)
        with locked(text.folder / "text.lock", wait=True):
            if any(path.is_file() and _kept(path) != content for path, content in files.items()):
                raise UserError(
                    f"{text.folder} holds another text of the name {self.title!r}, which trainings with this --run_dir"
                    " have read. Nothing was changed. Give another --run_dir, or remove that folder if it is not needed"
                )
            for path, content in files.items():
                if not path.is_file():
                    write_text(path, content)
        return text


def write_new(path: Path, content: str) -> str:
    """Only writes if the content differs: token caches depend on the modification time. Processes that share a study
    write once. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), wait=True):
        if not path.is_file() or _kept(path) != content:
            write_text(path, content)
    return str(path.resolve())


@TextConfig.register_subclass("wikitext2")
@dataclass(frozen=True)
class WikiText2(TextConfig):
    """folder: containing WikiText-2's `valid.txt` and `test.txt`. The training split is not needed."""

    folder: str
    title = "wikitext2"
    origins = ("valid.txt", "first half of test.txt", "second half of test.txt")

    def contents(self) -> tuple[str, ...]:
        valid, test = (_read(Path(self.folder) / name) for name in ("valid.txt", "test.txt"))
        return valid, *_cut(test, len(test) // 2)


@TextConfig.register_subclass("shakespeare")
@dataclass(frozen=True)
class Shakespeare(TextConfig):
    """folder: containing TinyShakespeare's `file`."""

    folder: str
    file: str = "input.txt"
    title = "shakespeare"
    origins = ("first 80 % of input.txt", "the next tenth", "the last tenth")

    def contents(self) -> tuple[str, ...]:
        play = _read(Path(self.folder) / self.file)
        return _cut(play, *(round(share * len(play)) for share in (0.8, 0.9)))


@TextConfig.register_subclass("hf")
@dataclass(frozen=True)
class HuggingFace(TextConfig):
    """id, name: of a dataset on the Hugging Face hub. text_key: the key of a record that holds its text.

    Attributes:
        train, select, report: its splits. They are downloaded once.
    """

    id: str
    name: str | None = None
    text_key: str = "text"
    train: str = "train"
    select: str = "validation"
    report: str = "test"
    title = property(lambda self: self.name or Path(self.id).name)
    origins = property(lambda self: tuple(f"split {split} of {self.id}" for split in self._splits))
    _splits = property(lambda self: (self.train, self.select, self.report))

    def prepare(self, folder: Path) -> Text:
        record, source = folder / f"{self.title}.json", json.dumps(dataclasses.asdict(self))
        text = Text(self.title, folder / self.title)
        is_here = record.is_file() and all(Path(text.file(part)).is_file() for part in PARTS)
        if not is_here or record.read_text(encoding="utf-8") != source:
            super().prepare(folder)
            write_text(record, source)
        return text

    def contents(self) -> tuple[str, ...]:
        return tuple(map(self._fetch, self._splits))

    def _fetch(self, split: str) -> str:
        try:
            source = open_source(HfDatasetSourceConfig(id=self.id, name=self.name), split)
        except UserError as error:
            raise UserError(f"{error} In an experiment: `text: {{type: files, name, train, select, report}}`") from None
        records = [] if source is None else list(source)
        if not records or self.text_key not in records[0]:
            keys = ", ".join(records[0]) if records else "none, for it is empty"
            raise UserError(
                f"{self.id}, {split}: its records have no text {self.text_key!r} (`text_key`); keys: {keys}"
            )
        return "\n".join(record[self.text_key] for record in records)


@TextConfig.register_subclass("files")
@dataclass(frozen=True)
class Files(TextConfig):
    """name: of the text. train, select, report: its files."""

    name: str
    train: str
    select: str
    report: str
    title = property(lambda self: self.name)
    origins = property(lambda self: (self.train, self.select, self.report))

    def contents(self) -> tuple[str, ...]:
        return tuple(_read(Path(path)) for path in self.origins)


@TextConfig.register_subclass("builtin")
@dataclass(frozen=True)
class Builtin(TextConfig):
    """text: one that ships with Python. Its validation split is halved; that of `library` between two files, so that
    no file is in both halves."""

    text: Literal["topics", "library"] = "topics"
    title = property(lambda self: self.text)

    @property
    def origins(self) -> tuple[str, ...]:
        half = "half of its validation split"
        source = "" if self.text == "topics" else f" of Python {platform.python_version()}"
        return f"training split of {self.text}{source}", f"first {half}", f"second {half}"

    def contents(self) -> tuple[str, ...]:
        train, validation = (list(documents_of(self.text, split)) for split in ("train", "validation"))
        whole = "\n".join(validation)
        if self.text == "topics":  # cut within a document, as for all results that there are
            return "\n".join(train), *_cut(whole, len(whole) // 2)
        ends = list(itertools.accumulate(len(document) + 1 for document in validation))
        first = 1 + min(range(len(ends)), key=lambda k: abs(ends[k] - len(whole) // 2))
        return tuple("\n".join(part) for part in (train, validation[:first], validation[first:]))


def _kept(path: Path) -> str:
    """The content of a file, with its line ends as they are."""
    return path.read_bytes().decode("utf-8")


@functools.cache
def _hash(path: Path, changed_at: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cut(text: str, *places: int) -> tuple[str, ...]:
    """Pieces of a text, cut at the first line end after each of these places."""
    ends = [text.find("\n", place) for place in places]
    cuts = [0, *(len(text) if end < 0 else end + 1 for end in ends), len(text)]
    return tuple(text[start:end] for start, end in itertools.pairwise(cuts))


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "Set the place of the text in the YAML, or by --text.folder DIR (two texts: --a.folder, --b.folder)"
        raise UserError(f"{path} cannot be read: {error}. {hint}") from None
