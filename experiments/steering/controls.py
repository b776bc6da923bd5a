"""Records of two texts with a control that identifies their source, for training and evaluation.

The control is a vector beside the text; or, for an ordinary transformer, a token in it (CTRL, Keskar et al. 2019).
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.texts import Text, write_new

Control = list[float]

TOKENS = (0xFE, 0xFF)  # for A and B: bytes that UTF-8, and so any text, does not have
_END = 256  # the end of a document, among byte tokens


def between(u: float) -> Control:
    """The control between text A (u = 0) and text B (u = 1)."""
    return [1.0 - u, u]


def controls(text: int) -> dict[str, Control | None]:
    """The controls under which text A (0) or B (1) is evaluated."""
    return {"right": between(float(text)), "wrong": between(1.0 - text), "none": None}


def token_of(control: Control | None) -> list[int]:
    """The control as a token; none if there is none, or it is between the texts."""
    return [token for token, share in zip(TOKENS, control or (), strict=False) if share == 1.0]


def training_records(
    texts: Sequence[Text],
    part: str,
    path: Path,
    *,
    size: int,
    without: float,
    shuffled: bool,
    sequence: int | None = None,
) -> str:
    """Writes the records of `part` of both texts in random order, and returns the path.

    Both texts give equally many records. A fraction `without` has no control, so that the model learns that case.

    Args:
        size: of a record, in characters.
        shuffled: permute the controls, so that they carry no information about the text.
        sequence: tokens of a training sequence, for `sequences` with control tokens instead of records.
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
    return write(pieces, controls, path, sequence, starts=part == "train")


def report_records(text: Text, control: Control | None, path: Path, size: int, sequence: int | None = None) -> str:
    """Writes the part `report` of one text under one control, and returns the path; `sequence` as for training."""
    pieces = cut(text.read("report"), size)
    return write(pieces, [control] * len(pieces), path, sequence)


def cut(text: str, size: int) -> list[str]:
    """Pieces of `size` characters, cut anywhere, so that the start of a record reveals nothing about its text. The
    remainder is left out."""
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def write(
    pieces: Sequence[str],
    controls: Sequence[Control | None],
    path: Path,
    sequence: int | None = None,
    starts: bool = False,
) -> str:
    if sequence is None:
        rows = ({"text": text, "control": own} for text, own in zip(pieces, controls, strict=True))
    else:
        rows = sequences(pieces, controls, sequence, starts)
    return write_new(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def sequences(
    pieces: Sequence[str], controls: Sequence[Control | None], size: int, starts: bool
) -> Iterator[dict[str, list[int]]]:
    """The sequences of `size` tokens that the records would be packed into, with control tokens.

    The token of a record stands before it, and at the start of each sequence that begins within it; so a sequence
    loses as many tokens at its end as it gains. Sequence i has the text of sequence i of the other arms, so that with
    the same seed all see the same text in the same order.

    Args:
        starts: count the loss of a sequence's first token after its control token. Without, as in the other arms,
            a sequence's first token of text is never predicted. Losses of control tokens do not count.
    """
    stream = [(token, own) for text, own in zip(pieces, controls, strict=True) for token in (*text.encode(), _END)]
    for start in range(0, len(stream) - size + 1, size):
        row, before = [], _END
        for token, own in stream[start : start + size]:
            row += [*(token_of(own) if before == _END else ()), token]
            before = token
        counts = [int(token not in TOKENS) for token in row[1:size]]
        counts[0] &= int(starts or row[0] not in TOKENS)
        yield {"input_ids": row[:size], "loss_weights": [*counts, 0]}


def data_of(**files: str) -> dict[str, object]:
    """`data` in YAML, for files of `sequences` as `train` and `validation`."""
    source = {"type": "files"} | {split: [path] for split, path in files.items()}
    format = {"type": "prebuilt", "loss_weights_key": "loss_weights"}
    components = {"text": {"source": source, "format": format}}
    weights = None if "train" in files else {"text": 0.0}
    return {"train": None, "validation": None, "components": components, "train_weights": weights}
