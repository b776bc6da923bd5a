"""Checksums of a folder of files that are written once: made when it is complete, compared before it is read."""

import hashlib
import json
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkvflow.files import write_text

CHECKSUMS = "checksums.json"
THREADS = min(8, os.cpu_count() or 1)
_SMALL_BYTES = 1 << 20


def write_checksums(folder: Path, later: Collection[str] = ()) -> None:
    """Writes `checksums.json` into a folder: size and sha256 of every file that is there.

    Args:
        later: names of files that are written after this one.
    """
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (CHECKSUMS, *later)]
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(sha256_of, files))
    record = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, hashes, strict=True)
    }
    write_text(folder / CHECKSUMS, json.dumps(record, indent=1) + "\n")


def damage_of(folder: Path, longest: int | None = None) -> str | None:
    """What is wrong with the files of a folder, for people; None if nothing is.

    A folder without `checksums.json`, of an older version of this package, is taken as it is.

    Args:
        longest: bytes of all files together up to which the content of all is compared; beyond, that of files below
            1 MiB, and the sizes of all. None: the content of all, however long.
    """
    try:
        record = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in record.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {CHECKSUMS} cannot be read ({error})"
    for name, (size, _) in expected.items():  # cheap, so first
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"its {CHECKSUMS} names the file {name}, which is outside"
        if not path.is_file():
            return f"its file {name} is gone"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes instead of {size}"
    is_long = longest is not None and sum(size for size, _ in expected.values()) > longest
    compared = {name: sha256 for name, (size, sha256) in expected.items() if size < _SMALL_BYTES or not is_long}
    with ThreadPoolExecutor(THREADS) as pool:
        for name, wrong in pool.map(lambda item: (item[0], _mismatch(folder / item[0], item[1])), compared.items()):
            if wrong is not None:
                return f"its file {name} {wrong}"
    return None


def _mismatch(path: Path, sha256: str) -> str | None:
    try:
        return None if sha256_of(path) == sha256 else "is not as it was written (sha256 differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def sha256_of(path: Path) -> str:
    """Of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
