"""Writes a checkpoint with its checksums: each process hashes what it writes while it writes."""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from qkvflow.checksums import Checksum, as_json, from_json, hashed, write_checksums
from qkvflow.inside.jax import SharedManager, name_files
from qkvflow.inside.levanter import checkpoint_of
from qkvflow.places import Place

_saves = itertools.count()  # all processes of a run count alike


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
                self._own.update(from_json(self.hear(_key(save, other))))
            write_checksums(self._place, self._own, later=["metadata.json"])
            if on_commit_callback is not None:
                on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit, transaction=transaction)

    def while_writing(self) -> None:
        self._own.update(_new_files(self._place, self._prefix, self._own))

    def when_written(self) -> None:
        if jax.process_index() > 0:
            self.tell(_key(self._save, jax.process_index()), as_json(self._own))


def _new_files(place: Place, prefix: str, known: dict[str, Checksum]) -> dict[str, Checksum]:
    """Of the files on a disk that begin with `prefix` and are not known yet."""
    if place.is_remote:
        return {}
    folder, _, begin = prefix.rpartition("/")
    names = (f"{folder}/{path.name}" for path in (place.local / folder).glob(f"{begin}*") if path.suffix != ".__lock")
    return hashed(place, (name for name in names if name not in known))


def _key(save: int, index: int) -> str:
    return f"qkvflow/checksums/{save}/{index}"
