"""YAML `text:` where the text of an experiment comes from: WikiText-2, Shakespeare, the hub, files, or one built in."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import draccus
from levanter.data.text import HfDatasetSourceConfig

from experiments import texts
from experiments.texts import Text
from qkvflow.data.cache import open_source
from qkvflow.data.sources import BUILTIN_TEXTS
from qkvflow.errors import UserError


class TextConfig(draccus.ChoiceRegistry, abc.ABC):
    """Where the text comes from, in three parts: to train on, to choose by, to report on."""

    @abc.abstractmethod
    def prepare(self, folder: Path) -> Text:
        """Writes the three parts below `folder`."""

    @property
    @abc.abstractmethod
    def parts(self) -> dict[str, str]:
        """What each part is, in words."""


@TextConfig.register_subclass("wikitext2")
@dataclass(frozen=True)
class WikiText2(TextConfig):
    """folder: with WikiText-2's `valid.txt` and `test.txt`."""

    folder: str

    def prepare(self, folder: Path) -> Text:
        with _told_what_for("valid.txt and test.txt"):
            return texts.wikitext2(self.folder, folder)

    @property
    def parts(self) -> dict[str, str]:
        return {"train": "valid.txt", "select": "first half of test.txt", "report": "second half of test.txt"}


@TextConfig.register_subclass("shakespeare")
@dataclass(frozen=True)
class Shakespeare(TextConfig):
    """folder: with TinyShakespeare's `input.txt`."""

    folder: str

    def prepare(self, folder: Path) -> Text:
        with _told_what_for("input.txt"):
            return texts.shakespeare(str(Path(self.folder) / "input.txt"), folder)

    @property
    def parts(self) -> dict[str, str]:
        return {"train": "first 80 % of input.txt", "select": "the next tenth", "report": "the last tenth"}


@TextConfig.register_subclass("hf")
@dataclass(frozen=True)
class HuggingFace(TextConfig):
    """id, name: of a data set on the Hugging Face hub. text_key: of a record, names its text.
    train, select, report: its splits. They are fetched once.
    """

    id: str
    name: str | None = None
    text_key: str = "text"
    train: str = "train"
    select: str = "validation"
    report: str = "test"

    def prepare(self, folder: Path) -> Text:
        name = self.name or Path(self.id).name
        return texts.fetched(
            name, dataclasses.asdict(self), self._split, [self.train, self.select, self.report], folder
        )

    def _split(self, split: str) -> str:
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

    @property
    def parts(self) -> dict[str, str]:
        return {part: f"split {getattr(self, part)} of {self.id}" for part in texts.PARTS}


@TextConfig.register_subclass("files")
@dataclass(frozen=True)
class Files(TextConfig):
    """name: of the text. train, select, report: its files."""

    name: str
    train: str
    select: str
    report: str

    def prepare(self, folder: Path) -> Text:
        return texts.files(self.name, self.train, self.select, self.report, folder)

    @property
    def parts(self) -> dict[str, str]:
        return {part: getattr(self, part) for part in texts.PARTS}


@TextConfig.register_subclass("builtin")
@dataclass(frozen=True)
class Builtin(TextConfig):
    """text: one of those that every Python carries, `topics` or `library`."""

    text: str = "topics"

    def __post_init__(self):
        if self.text not in BUILTIN_TEXTS:
            raise UserError(f"text.text: {self.text!r} is not known. Choices: {', '.join(BUILTIN_TEXTS)}")

    def prepare(self, folder: Path) -> Text:
        return texts.builtin(self.text, folder)

    @property
    def parts(self) -> dict[str, str]:
        half = "half of its validation split"
        return {"train": f"training split of {self.text}", "select": f"first {half}", "report": f"second {half}"}


@contextlib.contextmanager
def _told_what_for(names: str) -> Iterator[None]:
    """Adds to an error what the folder of a text must hold."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}. `folder` of the text must be one that holds {names}: give it by --text.folder DIR (where there"
            " are two texts, --a.folder or --b.folder)"
        ) from None
