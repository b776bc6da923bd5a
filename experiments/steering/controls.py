"""Records of two texts with a control that identifies their source, for training and evaluation."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.texts import Text, write_new

Control = list[float]


def between(u: float) -> Control:
    """The control between text A (u = 0) and text B (u = 1)."""
    return [1.0 - u, u]


def controls(text: int) -> dict[str, Control | None]:
    """The controls under which text A (0) or B (1) is evaluated."""
    return {"right": between(float(text)), "wrong": between(1.0 - text), "none": None}


def training_records(texts: Sequence[Text], part: str, path: Path, *, size: int, without: float, shuffled: bool) -> str:
    """Writes the records of `part` of both texts in random order, and returns the path.

    Both texts give equally many records. A fraction `without` has no control, so that the model learns that case.

    Args:
        size: of a record, in characters.
        shuffled: permute the controls, so that they carry no information about the text.
    """
    chance = random.Random(0)  # the same records for all seeds
    whole = [text.read(part) for text in texts]
    least = min(len(text) for text in whole)
    records = [
        (piece, None if chance.random() < without else between(float(index)))
        for index, text in enumerate(whole)
        for piece in cut(text[:least], size)
    ]
    chance.shuffle(records)
    pieces, controls = map(list, zip(*records, strict=True))
    if shuffled:
        chance.shuffle(controls)
    return write(pieces, controls, path)


def report_records(text: Text, control: Control | None, path: Path, size: int) -> str:
    """Writes the part `report` of one text under one control, and returns the path."""
    pieces = cut(text.read("report"), size)
    return write(pieces, [control] * len(pieces), path)


def cut(text: str, size: int) -> list[str]:
    """Pieces of `size` characters, cut anywhere, so that the start of a record reveals nothing about its text. The
    remainder is left out."""
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def write(pieces: Sequence[str], controls: Sequence[Control | None], path: Path) -> str:
    lines = (json.dumps({"text": text, "control": own}) for text, own in zip(pieces, controls, strict=True))
    return write_new(path, "".join(f"{line}\n" for line in lines))
