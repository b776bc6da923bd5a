"""Holding out the validation part of files: by document for records, the last part of a plain text."""

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from qkvflow.data.readers import read_records
from qkvflow.errors import UserError

_WINDOW_BYTES, _REACH_BYTES = 1 << 16, 1 << 10


def text_boundary(path: Path, fraction: float) -> int:
    """The byte offset at which the last part of a plain text, about `fraction` of the bytes, begins.

    This is the first line end at or after `(1 - fraction) * size`; failing that, the last line end before it, then a
    space, then a position between two characters. Line ends and spaces count up to half of the last part (or 1,024
    bytes) away, but before that place at most as far as makes the last part twice as long. Neither part is empty if the
    text has at least two characters; of a single one, the last part is.
    """
    size = path.stat().st_size
    if size < 2:
        return size
    target = min(max(int(size * (1 - fraction)), 1), size - 1)
    reach = max(int(fraction * size / 2), _REACH_BYTES)
    back = min(reach, math.ceil(fraction * size)) if is_short(size, fraction) else reach
    first, last = max(target - back, 1), min(target + reach, size - 1)
    with path.open("rb") as file:
        for mark in (b"\n", b" "):
            # A line that ends exactly at the target counts.
            for start in range(target - 1, last, _WINDOW_BYTES):
                file.seek(start)
                found = file.read(min(_WINDOW_BYTES, last - start)).find(mark)
                if found >= 0:
                    return start + found + 1
            for stop in range(target - 1, first - 1, -_WINDOW_BYTES):
                start = max(stop - _WINDOW_BYTES, first - 1)
                file.seek(start)
                found = file.read(stop - start).rfind(mark)
                if found >= 0:
                    return start + found + 1
        # Bytes 0b10xxxxxx continue a UTF-8 character of at most four bytes.
        near = [*range(target, min(target + 4, size)), *range(target - 1, max(target - 4, 0), -1)]
        for place in near:
            file.seek(place)
            if file.read(1)[0] & 0xC0 != 0x80:
                return place
    return size


def is_short(size: int, fraction: float) -> bool:
    """Whether the last part of a text of `size` bytes is so short that it bounds how far back it may begin."""
    return fraction * size < _REACH_BYTES


def record_hash(record: dict[str, Any], text_key: str | None, read_keys: tuple[str, ...] = ()) -> int:
    """64 bits of a record's content: equal documents are always in the same split.

    Args:
        text_key: of the text, which is all that counts; None for whole records.
        read_keys: the keys of a whole record that count: those that its format reads. All, if the record has none.
    """
    if text_key is None:
        read = {key: record[key] for key in read_keys if record.get(key) is not None}
        content = json.dumps(read or record, sort_keys=True, default=str)
    else:
        content = record[text_key]
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def record_threshold(
    files: tuple[Path, ...], text_key: str | None, fraction: float, read_keys: tuple[str, ...] = ()
) -> int:
    """The largest `record_hash` held out, such that `fraction` of the distinct documents (at least one) is held out.

    Raises:
        UserError: there are fewer than two distinct documents.
    """
    stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return _record_threshold(files, stamps, text_key, fraction, read_keys)


@functools.lru_cache(maxsize=8)
def _record_threshold(
    files: tuple[Path, ...], stamps: tuple, text_key: str | None, fraction: float, read_keys: tuple[str, ...]
) -> int:
    hashes = (record_hash(record, text_key, read_keys) for path in files for record in read_records(path, text_key))
    distinct = np.unique(np.fromiter(hashes, dtype=np.uint64))
    if len(distinct) < 2:
        raise UserError(
            f"validation_fraction needs at least two different documents, but {', '.join(map(str, files))} contain"
            f" {len(distinct)}. Give validation files, or set validation_fraction to 0."
        )
    count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
    return int(distinct[count - 1])
