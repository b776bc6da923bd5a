"""The texts of the experiment, each in three files: to train on, to watch while tuning, and to report on once."""

from dataclasses import dataclass
from pathlib import Path

from qkvflow.data.sources import BUILTIN_TEXTS
from qkvflow.errors import UserError

_SHAKESPEARE_TRAIN, _SHAKESPEARE_SELECT = 0.8, 0.9


@dataclass(frozen=True)
class Text:
    """One text as the files `train.txt`, `select.txt` and `report.txt` of a folder."""

    name: str
    folder: Path

    def file(self, part: str) -> str:
        return str((self.folder / f"{part}.txt").resolve())

    def sizes(self) -> dict[str, int]:
        """Bytes of each part."""
        return {part: Path(self.file(part)).stat().st_size for part in ("train", "select", "report")}


def prepare_texts(wikitext2: str | None, shakespeare: str | None, folder: Path, builtin: bool) -> list[Text]:
    """Writes the parts of both texts below `folder`.

    wikitext2: a folder with `valid.txt` and `test.txt`. The training split is left out: the experiment trains on
        `valid.txt`, watches the first half of `test.txt` and reports on its second half.
    shakespeare: TinyShakespeare's file; its first 80 % are to train on, the next tenth to watch, the last to report on.
    builtin: without them take the two texts that every Python carries instead.

    Errors: UserError if a file is not there.
    """
    if wikitext2 is None and shakespeare is None and builtin:
        return [_builtin(name, folder) for name in BUILTIN_TEXTS]
    if wikitext2 is None or shakespeare is None:
        raise UserError(
            "give both texts: --wikitext2 FOLDER (with valid.txt and test.txt) --shakespeare FILE; or --smoke alone,"
            " which takes texts that every Python carries"
        )
    valid, test = (_read(Path(wikitext2) / name) for name in ("valid.txt", "test.txt"))
    half = _line_end(test, len(test) // 2)
    play = _read(Path(shakespeare))
    first, second = (_line_end(play, round(share * len(play))) for share in (_SHAKESPEARE_TRAIN, _SHAKESPEARE_SELECT))
    return [
        _write("wikitext2", folder, valid, test[:half], test[half:]),
        _write("shakespeare", folder, play[:first], play[first:second], play[second:]),
    ]


def _builtin(name: str, folder: Path) -> Text:
    train, validation = ("\n".join(BUILTIN_TEXTS[name](split)) for split in ("train", "validation"))
    half = _line_end(validation, len(validation) // 2)
    return _write(name, folder, train, validation[:half], validation[half:])


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
    for part, content in (("train", train), ("select", select), ("report", report)):
        path = Path(text.file(part))
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
    return text
