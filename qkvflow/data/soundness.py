"""Checks that a token cache is unchanged: a missing file would be read as zeros, a changed one as other tokens."""

import functools
import json
import math
from pathlib import Path

from levanter.store.cache import TreeCache

from qkvflow.checksums import CHECKSUMS, Checksum, damage_of, first_changed, write_checksums
from qkvflow.errors import UserError
from qkvflow.places import Place

LEDGER = "shard_ledger.json"
# A cache up to this size is compared completely whenever it is opened, which takes less than a second.
_WHOLE_BYTES = 256 << 20
_SMALL_BYTES = 1 << 20


def seal(cache: Path) -> None:
    """Writes the checksums of a complete cache."""
    write_checksums(cache)


def damage(cache: Path, *, whole: bool = False) -> str | None:
    """A readable description of what is wrong with the files of a finished cache; None if they are intact.

    Compares the sizes of all files with `checksums.json`, and the content of a cache of up to 256 MB. Of a larger
    cache, unless `whole`, it only compares the content of small files, which hold the token boundaries. Within one
    process, a cache is only read again if its files changed in size or time.
    """
    return _damage(cache, _stamp(cache), whole)


def refusal(cache: Path, what: str) -> UserError:
    """The error for a damaged cache."""
    return UserError(
        f"the token cache {cache} is damaged: {what}. To rebuild it from the data, run the same command with"
        " `--data.rebuild_caches true`; or restore the file"
    )


def check_counts(cache: Path, tree: TreeCache[dict]) -> None:
    """Checks that a cache from an older version, without checksums, has all its tokens; then writes its checksums.

    Raises:
        UserError: files are missing.
    """
    if (cache / CHECKSUMS).is_file():
        return
    for field, count in tree.ledger.field_counts.items():
        for array, length in ((f"{field}/offsets", tree.ledger.total_num_rows + 1), (f"{field}/data", count)):
            settings = json.loads((cache / array / "zarr.json").read_text())
            for number in range(math.ceil(length / settings["chunk_grid"]["configuration"]["chunk_shape"][0])):
                if not (cache / array / "c" / str(number)).is_file():
                    raise refusal(cache, f"its file {array}/c/{number} is missing")
        found = tree.flat_field_length(field) if len(tree) else 0
        if found != count:
            raise refusal(cache, f"it has {found} values of {field} instead of {count}")
    if sum(size for _, size, _ in _stamp(cache)) <= _WHOLE_BYTES:
        try:
            seal(cache)
        except OSError:  # the folder may be read-only
            return


def _stamp(cache: Path) -> tuple[tuple[str, int, int], ...]:
    files = [(path, path.stat()) for path in sorted(cache.rglob("*")) if path.is_file()]
    return tuple((str(path), status.st_size, status.st_mtime_ns) for path, status in files)


@functools.lru_cache(maxsize=256)
def _damage(cache: Path, stamp: tuple, whole: bool) -> str | None:
    return damage_of(cache, first_changed if whole else _first_changed_soon)


def _first_changed_soon(place: Place, expected: dict[str, Checksum]) -> str | None:
    """`first_changed`, but for a large cache only of its small files."""
    is_whole = sum(checksum.bytes for checksum in expected.values()) <= _WHOLE_BYTES
    small = {name: checksum for name, checksum in expected.items() if checksum.bytes < _SMALL_BYTES}
    return first_changed(place, expected if is_whole else small)
