"""Another text that every Python carries: the source of its standard library, split into train and validation."""

import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from qkvflow.errors import UserError

_BYTES = 1_000_000
_VALIDATION_EVERY = 10


def text_of(split: str) -> Iterator[str]:
    """The modules of the split `train` or `validation`, in an order that mixes the subjects; about 1 MB in all.

    Errors: `UserError` if this Python carries no sources.
    """
    for index, path in enumerate(_modules()):
        if (index % _VALIDATION_EVERY == 0) == (split == "validation"):
            yield path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _modules() -> tuple[Path, ...]:
    """Top-level modules in the order of a hash of their names, until there is enough text."""
    folder = Path(sysconfig.get_path("stdlib"))
    chosen, size = [], 0
    for path in sorted(folder.glob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if size >= _BYTES:
            break
        chosen.append(path)
        size += path.stat().st_size
    if size < _BYTES // 2:
        raise UserError(
            f"this Python carries no sources of its standard library in {folder}: give other text, such as"
            " --data.train my.txt"
        )
    return tuple(chosen)
