"""The texts of experiments, each in three files: to train on, to watch and choose by, and to report on once."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qkvflow.data.sources import BUILTIN_TEXTS
from qkvflow.errors import UserError

_SHAKESPEARE_TRAIN, _SHAKESPEARE_SELECT = 0.8, 0.9
PARTS = ("train", "select", "report")


@dataclass(frozen=True)
class Text:
    """One text as the files `train.txt`, `select.txt` and `report.txt` of a folder."""

    name: str
    folder: Path

    def file(self, part: str) -> str:
        return str((self.folder / f"{part}.txt").resolve())

    def sizes(self) -> dict[str, int]:
        """Bytes of each part."""
        return {part: Path(self.file(part)).stat().st_size for part in PARTS}

    def hash(self, part: str) -> str:
        """sha256 (hex) of a part."""
        return hashlib.sha256(Path(self.file(part)).read_bytes()).hexdigest()


def wikitext2(source: str, folder: Path) -> Text:
    """WikiText-2 without its training split: to train on is `valid.txt`, to watch the first half of `test.txt`, to
    report on its second half.

    source: a folder with `valid.txt` and `test.txt`.

    Errors: UserError if one is not there.
    """
    valid, test = (_read(Path(source) / name) for name in ("valid.txt", "test.txt"))
    half = _line_end(test, len(test) // 2)
    return _write("wikitext2", folder, valid, test[:half], test[half:])


def shakespeare(source: str, folder: Path) -> Text:
    """TinyShakespeare's file: its first 80 % are to train on, the next tenth to watch, the last to report on.

    Errors: UserError if it is not there.
    """
    play = _read(Path(source))
    first, second = (_line_end(play, round(share * len(play))) for share in (_SHAKESPEARE_TRAIN, _SHAKESPEARE_SELECT))
    return _write("shakespeare", folder, play[:first], play[first:second], play[second:])


def builtin(name: str, folder: Path) -> Text:
    """A text that every Python carries; its validation split is halved."""
    train, validation = ("\n".join(BUILTIN_TEXTS[name](split)) for split in ("train", "validation"))
    half = _line_end(validation, len(validation) // 2)
    return _write(name, folder, train, validation[:half], validation[half:])


def files(name: str, train: str, select: str, report: str, folder: Path) -> Text:
    """Three files of the user.

    Errors: UserError if one is not there, or two are the same.
    """
    contents = [_read(Path(path)) for path in (train, select, report)]
    _check_differ(name, contents, [train, select, report])
    return _write(name, folder, *contents)


def fetched(
    name: str, source: dict[str, str | None], fetch: Callable[[str], str], splits: list[str], folder: Path
) -> Text:
    """Three splits of a data set elsewhere: fetched if the folder does not hold them from the same `source`."""
    text, record = Text(name, folder / name), folder / f"{name}.json"
    is_here = record.is_file() and all(Path(text.file(part)).is_file() for part in PARTS)
    if not is_here or json.loads(record.read_text(encoding="utf-8")) != source:
        contents = [fetch(split) for split in splits]
        _check_differ(name, contents, splits)
        text = _write(name, folder, *contents)
        record.write_text(json.dumps(source), encoding="utf-8")
    return text


def _check_differ(name: str, contents: list[str], origins: list[str]) -> None:
    if len(set(contents)) < len(contents):
        raise UserError(
            f"the texts of {name!r} to train on, to select by and to report on must differ, but two of {origins[0]},"
            f" {origins[1]} and {origins[2]} have the same content"
        )


def _line_end(text: str, place: int) -> int:
    """The first place after `place` where a line begins."""
    found = text.find("\n", place)
    return len(text) if found < 0 else found + 1


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _write(name: str, folder: Path, train: str, select: str, report: str) -> Text:
    """Writes only what differs: the token caches go by the time of change."""
    text = Text(name, folder / name)
    text.folder.mkdir(parents=True, exist_ok=True)
    for part, content in zip(PARTS, (train, select, report), strict=True):
        path = Path(text.file(part))
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
    return text
