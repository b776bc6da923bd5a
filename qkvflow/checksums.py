"""Checksums of a folder of files that are written once: created when it is complete, compared before it is loaded."""

import json
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from qkvflow.places import Place

CHECKSUMS = "checksums.json"
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Checksum:
    """What is known of a file.

    Attributes:
        bytes: its size.
        sha256: of its content; None in a bucket.
        tag: what the bucket says of its content; None on a disk.
    """

    bytes: int
    sha256: str | None = None
    tag: str | None = None


def write_checksums(
    folder: str | os.PathLike | Place, known: dict[str, Checksum] | None = None, later: Collection[str] = ()
) -> None:
    """Writes `checksums.json` into a folder: of every file that is there.

    Args:
        known: of files that need not be read again.
        later: names of files that are written after this one.
    """
    place, known = Place.of(folder), known or {}
    others = {n: info for n, info in place.files().items() if n not in known and n not in (CHECKSUMS, *later)}
    if place.is_remote:
        found = {name: Checksum(info.bytes, tag=info.tag) for name, info in others.items()}
    else:
        found = hashed(place, others)
    place.write(CHECKSUMS, (as_json(known | found) + "\n").encode())


def damage_of(
    folder: str | os.PathLike | Place, compare: Callable[[Place, dict[str, Checksum]], str | None] | None = None
) -> str | None:
    """What is wrong with the files of a complete folder, for people; None if nothing is.

    A folder without `checksums.json`, of an older version of this package, is taken as it is.

    Args:
        compare: does what `first_changed` does, by default; for those who compare only some files.
    """
    place = Place.of(folder)
    try:
        expected = from_json(place.read(CHECKSUMS).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {CHECKSUMS} cannot be read ({error})"
    there = place.files()
    for name, checksum in expected.items():  # cheap, so first
        if not _is_inside(place, name):
            return f"its {CHECKSUMS} names the file {name}, which is outside the folder"
        if name not in there:
            return f"its file {name} is missing"
        if there[name].bytes != checksum.bytes:
            return f"its file {name} has {there[name].bytes} bytes instead of {checksum.bytes}"
        if None not in (checksum.tag, there[name].tag) and there[name].tag != checksum.tag:
            return f"its file {name} has changed since it was written ({there[name].tag} instead of {checksum.tag})"
    name = None if place.is_remote else (compare or first_changed)(place, expected)
    return None if name is None else f"its file {name} {_change(place, name, expected[name])}"


def first_changed(place: Place, expected: dict[str, Checksum]) -> str | None:
    """The first file of a folder on a disk whose content is not the expected one."""
    with ThreadPoolExecutor(_THREADS) as pool:
        changes = pool.map(lambda item: _change(place, *item), expected.items())
        return next((name for name, change in zip(expected, changes, strict=True) if change is not None), None)


def hashed(place: Place, names: Iterable[str]) -> dict[str, Checksum]:
    """Of files on a disk, which are read."""

    def checksum(name: str) -> tuple[str, Checksum]:
        return name, Checksum((place.local / name).stat().st_size, sha256_of(place.local / name))

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(pool.map(checksum, names))


def sha256_of(path: Path) -> str:
    """Of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def as_json(record: dict[str, Checksum]) -> str:
    """As `checksums.json` has them, by file."""
    plain = {name: {k: v for k, v in vars(record[name]).items() if v is not None} for name in sorted(record)}
    return json.dumps(plain, indent=1)


def from_json(text: str) -> dict[str, Checksum]:
    """The inverse of `as_json`."""

    def read(entry: dict) -> Checksum:
        return Checksum(int(entry["bytes"]), entry.get("sha256"), entry.get("tag"))

    return {str(name): read(entry) for name, entry in json.loads(text).items()}


def _change(place: Place, name: str, expected: Checksum) -> str | None:
    try:
        is_same = expected.sha256 is None or sha256_of(place.local / name) == expected.sha256
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if is_same else "has changed since it was written (sha256 differs)"


def _is_inside(place: Place, name: str) -> bool:
    if place.is_remote:
        return not name.startswith("/") and ".." not in name.split("/")
    return (place.local / name).resolve().is_relative_to(place.local.resolve())
