"""Files: user-supplied paths, and atomic writes of small files."""

import atexit
import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkvflow.errors import UserError, shortened

_scratch: list[Path] = []  # of this process: none yet, or one
_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, on nearly every file system
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, or the largest file


def says_disk_is_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, is one of the many with which libraries report a full disk."""
    causes = [error, error.__cause__, error.__context__]
    return any(os.strerror(number) in str(cause) for cause in causes for number in _FULL)


def is_unicode(text: str) -> bool:
    """Whether a text has no half characters, and no bytes of a command line that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def local_path(name: str | os.PathLike) -> Path:
    """The path that a user names; `~` is their home, anything else is literal.

    Raises:
        UserError: `~name` of nobody, or what cannot be a path.
    """
    shown = shortened(str(name))
    if "\0" in str(name):
        raise UserError(f"{shown!r} cannot be a path: it contains a zero byte")
    try:
        path = Path(name).expanduser()
        sizes = [len(os.fsencode(part)) for part in (path, *path.parts)]
    except RuntimeError:
        raise UserError(f"{shown}: there is no home folder of that user; write the full path") from None
    except UnicodeEncodeError:
        raise UserError(f"{shown!r} cannot be a path: it contains half of a character") from None
    if sizes[0] >= _LONGEST_PATH or max(sizes[1:], default=0) > _LONGEST_NAME:
        raise UserError(f"{shown} is too long for a path: a name has at most {_LONGEST_NAME} bytes")
    return path


def array_path(name: str | os.PathLike) -> Path:
    """`local_path` for a folder of arrays, which TensorStore and fsspec read and write.

    Raises:
        UserError: also for a path that is not UTF-8, which TensorStore cannot open, or has `::`, which fsspec takes
            for two paths.
    """
    path = local_path(name)
    if "::" in str(path.absolute()):
        raise UserError(
            f"{path.absolute()} contains `::`, which libraries interpret as two paths. Choose another folder"
        )
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        shown = shortened(repr(str(path.absolute())))
        raise UserError(
            f"{shown} cannot hold arrays: its name is not UTF-8. Rename it, or choose another folder"
        ) from None
    return path


def json_text(content: Any, indent: int = 2) -> str:
    """JSON, with null for numbers that are not finite, which it does not have."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return value if not isinstance(value, float) or math.isfinite(value) else None

    return json.dumps(plain(content), indent=indent, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8, in place of one that may be there; a reader sees the old one or the new one."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` for a `with` block to write a file to, which then gets the name `path`."""
    fresh = path.with_name(fresh_name(path.name))
    try:
        yield fresh
        with fresh.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave an empty file of the new name
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def scratch_folder() -> Path:
    """A new folder, which `remove_scratch` removes at the end of the process."""
    if not _scratch:
        _scratch.append(Path(tempfile.mkdtemp(prefix="qkvflow-")))
        atexit.register(remove_scratch)
    folder = _scratch[0] / secrets.token_hex(4)
    folder.mkdir()
    return folder


def remove_scratch() -> None:
    """Removes what `scratch_folder` has made."""
    while _scratch:
        shutil.rmtree(_scratch.pop(), ignore_errors=True)


def fresh_name(name: str) -> str:
    """A name that no other process has for a file that is not yet whole."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


def is_fresh(name: str) -> bool:
    """Whether a file of this name is one of `fresh_name`, which a killed process left."""
    return name.startswith(".") and name.endswith(".tmp")
