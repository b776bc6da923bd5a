"""Checksums of a checkpoint: written before it counts as complete, compared before anything of it is read."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from qkvflow.files import write_text
from qkvflow.inside.levanter import checkpoint_of

CHECKSUMS = "checksums.json"
_WRITTEN_LATER = {CHECKSUMS, "metadata.json"}
_THREADS = min(8, os.cpu_count() or 1)


class ChecksumManager(GlobalAsyncCheckpointManager):
    """Writes the arrays of a checkpoint, then its `checksums.json`; then Levanter marks it as complete.

    Differs from Levanter, which marks it once the arrays are on disk. With several processes all have
    written by then, and the first one makes the checksums of all files.
    """

    def serialize(
        self,
        arrays: Any,
        tensorstore_specs: Any,
        *,
        on_commit_callback: Callable[[], None] | None = None,
        transaction: Any = None,
    ) -> None:
        folder = checkpoint_of(tensorstore_specs)

        def commit() -> None:
            write_checksums(folder)
            if on_commit_callback is not None:
                on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit, transaction=transaction)


def write_checksums(checkpoint: Path) -> None:
    """Writes `checksums.json` into a checkpoint: size and sha256 of every file that is there."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name not in _WRITTEN_LATER]
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(_sha256, files))
    record = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, hashes, strict=True)
    }
    write_text(checkpoint / CHECKSUMS, json.dumps(record, indent=1) + "\n")


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with the files of a complete checkpoint, for people; None if nothing is.

    A checkpoint without `checksums.json`, of an older version of this package, is taken as it is.
    """
    try:
        record = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in record.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {CHECKSUMS} cannot be read ({error})"
    for name, (size, _) in expected.items():  # cheap, so first
        path = checkpoint / name
        if not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"its {CHECKSUMS} names the file {name}, which is outside"
        if not path.is_file():
            return f"its file {name} is gone"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes instead of {size}"
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, wrong in pool.map(lambda item: (item[0], _mismatch(checkpoint / item[0], item[1][1])), expected.items()):
            if wrong is not None:
                return f"its file {name} {wrong}"
    return None


def _mismatch(path: Path, sha256: str) -> str | None:
    try:
        return None if _sha256(path) == sha256 else "is not as it was written (sha256 differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
