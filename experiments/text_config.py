"""YAML `text:` where the text of an experiment comes from: WikiText-2, Shakespeare, files, or the Python library."""

import abc
from dataclasses import dataclass
from pathlib import Path

import draccus

from experiments import texts
from experiments.texts import Text
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
        return texts.shakespeare(str(Path(self.folder) / "input.txt"), folder)

    @property
    def parts(self) -> dict[str, str]:
        return {"train": "first 80 % of input.txt", "select": "the next tenth", "report": "the last tenth"}


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
