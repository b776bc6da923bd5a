"""Checksums of a checkpoint: written before it counts as complete, compared before anything of it is read."""

import itertools
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from qkvflow.checksums import CHECKSUMS, THREADS, sha256_of
from qkvflow.inside.jax import SharedManager, name_files
from qkvflow.inside.levanter import checkpoint_of
from qkvflow.runs.places import Place

_WRITTEN_LATER = {CHECKSUMS, "metadata.json"}
_saves = itertools.count()  # all processes of a run count alike


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


class ChecksumManager(SharedManager):
    """Writes the arrays of a checkpoint, then its `checksums.json`; then Levanter marks it as complete.

    Differs from Levanter, which marks it once the arrays are on disk. Of several processes each writes files with names
    of its own and hashes them as they appear, while they are in its memory; the first one gathers what all have found.
    Of a bucket nothing is read again: it tells sizes and tags.
    """

    def serialize(
        self,
        arrays: Any,
        tensorstore_specs: Any,
        *,
        on_commit_callback: Callable[[], None] | None = None,
        transaction: Any = None,
    ) -> None:
        self.wait_until_finished()
        save, count = next(_saves), jax.process_count()
        self._save = save
        self._place, self._prefix = Place.of(checkpoint_of(tensorstore_specs)), f"d/{jax.process_index()}-"
        name_files(tensorstore_specs, self._prefix)
        self._own: dict[str, Checksum] = {}

        def commit() -> None:
            for other in range(1, count):
                self._own.update(_from_json(self.hear(_key(save, other))))
            write_checksums(self._place, self._own)
            if on_commit_callback is not None:
                on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit, transaction=transaction)

    def while_writing(self) -> None:
        self._own.update(_new_files(self._place, self._prefix, self._own))

    def when_written(self) -> None:
        if jax.process_index() > 0:
            self.tell(_key(self._save, jax.process_index()), _as_json(self._own))


def write_checksums(place: Place, known: dict[str, Checksum]) -> None:
    """Writes `checksums.json` into a checkpoint: of every file that is there.

    Args:
        known: of files that need not be read again.
    """
    others = {name: info for name, info in place.files().items() if name not in known and name not in _WRITTEN_LATER}
    if place.is_remote:
        found = {name: Checksum(info.bytes, tag=info.tag) for name, info in others.items()}
    else:
        found = _hashed(place, others)
    place.write(CHECKSUMS, (_as_json(known | found) + "\n").encode())


def damage_of(
    checkpoint: str | os.PathLike | Place, compare: Callable[[Place, dict[str, Checksum]], str | None] | None = None
) -> str | None:
    """What is wrong with the files of a complete checkpoint, for people; None if nothing is.

    A checkpoint without `checksums.json`, of an older version of this package, is taken as it is.

    Args:
        compare: does what `first_changed` does, by default.
    """
    place = Place.of(checkpoint)
    try:
        expected = _from_json(place.read(CHECKSUMS).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {CHECKSUMS} cannot be read ({error})"
    there = place.files()
    for name, checksum in expected.items():  # cheap, so first
        if not _is_inside(place, name):
            return f"its {CHECKSUMS} names the file {name}, which is outside"
        if name not in there:
            return f"its file {name} is gone"
        if there[name].bytes != checksum.bytes:
            return f"its file {name} has {there[name].bytes} bytes instead of {checksum.bytes}"
        if None not in (checksum.tag, there[name].tag) and there[name].tag != checksum.tag:
            return f"its file {name} is not as it was written ({there[name].tag} instead of {checksum.tag})"
    name = None if place.is_remote else (compare or first_changed)(place, expected)
    return None if name is None else f"its file {name} {_change(place, name, expected[name])}"


def first_changed(place: Place, expected: dict[str, Checksum]) -> str | None:
    """The first file of a checkpoint on a disk whose content is not the expected one."""
    with ThreadPoolExecutor(THREADS) as pool:
        changes = pool.map(lambda item: _change(place, *item), expected.items())
        return next((name for name, change in zip(expected, changes, strict=True) if change is not None), None)


def _change(place: Place, name: str, expected: Checksum) -> str | None:
    try:
        is_same = expected.sha256 is None or sha256_of(place.local / name) == expected.sha256
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if is_same else "is not as it was written (sha256 differs)"


def _new_files(place: Place, prefix: str, known: dict[str, Checksum]) -> dict[str, Checksum]:
    """Of the files on a disk that begin with `prefix` and are not known yet."""
    if place.is_remote:
        return {}
    folder, _, begin = prefix.rpartition("/")
    names = (f"{folder}/{path.name}" for path in (place.local / folder).glob(f"{begin}*") if path.suffix != ".__lock")
    return _hashed(place, (name for name in names if name not in known))


def _hashed(place: Place, names: Iterable[str]) -> dict[str, Checksum]:
    def checksum(name: str) -> tuple[str, Checksum]:
        return name, Checksum((place.local / name).stat().st_size, sha256_of(place.local / name))

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(checksum, names))


def _is_inside(place: Place, name: str) -> bool:
    if place.is_remote:
        return not name.startswith("/") and ".." not in name.split("/")
    return (place.local / name).resolve().is_relative_to(place.local.resolve())


def _as_json(record: dict[str, Checksum]) -> str:
    plain = {name: {k: v for k, v in vars(record[name]).items() if v is not None} for name in sorted(record)}
    return json.dumps(plain, indent=1)


def _from_json(text: str) -> dict[str, Checksum]:
    def read(entry: dict) -> Checksum:
        return Checksum(int(entry["bytes"]), entry.get("sha256"), entry.get("tag"))

    return {str(name): read(entry) for name, entry in json.loads(text).items()}


def _key(save: int, index: int) -> str:
    return f"qkvflow/checksums/{save}/{index}"
