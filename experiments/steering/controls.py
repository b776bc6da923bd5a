"""Records of two texts with a control that says which one each is from: what the models are trained and read on."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.texts import Text, write_new

Control = list[float]


def between(u: float) -> Control:
    """The control on the way from text A (u = 0) to text B (u = 1)."""
    return [1.0 - u, u]


def controls(text: int) -> dict[str, Control | None]:
    """What text A (0) or B (1) can be read under."""
    return {"right": between(float(text)), "wrong": between(1.0 - text), "none": None}


def training_records(texts: Sequence[Text], part: str, path: Path, *, size: int, without: float, shuffled: bool) -> str:
    """Writes the records of `part` of both texts, in random order, and returns the path.

    Both give as many records. A share `without` has no control, so that a model knows what no control means.

    Args:
        size: of a record, in characters.
        shuffled: the controls are dealt out anew, so that they say nothing about the text.
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
    """Pieces of `size` characters, wherever that cuts: so where a record begins says nothing about its text. The rest
    is left out."""
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def write(pieces: Sequence[str], controls: Sequence[Control | None], path: Path) -> str:
    lines = (json.dumps({"text": text, "control": own}) for text, own in zip(pieces, controls, strict=True))
    return write_new(path, "".join(f"{line}\n" for line in lines))
