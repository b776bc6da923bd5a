"""The disk of a run: checks access and free space before any work, and gives one clear error when it is full."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from qkvflow.errors import UserError, shortened
from qkvflow.files import fresh_name, says_disk_is_full
from qkvflow.units import DECIMAL, scaled


@contextlib.contextmanager
def refusals_are_told(path: Path) -> Iterator[None]:
    """Turns file system errors from creating or writing the run directory `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write the run directory {shortened(str(path))}: {_reason(error)}") from None


def write_a_trial(path: Path) -> None:
    """Writes a file to the folder and removes it.

    Raises:
        OSError: that fails, for example because the disk is full.
    """
    trial = path / fresh_name("trial")
    try:
        with open(trial, "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # only this finds a disk that has become full
    finally:
        trial.unlink(missing_ok=True)


def require_space(path: Path, size: int, count: int) -> None:
    """Compares the free space of a disk with what checkpoints take.

    Raises:
        UserError: the disk of `path` has no space for one or two checkpoints (`count`) of `size` bytes each.
    """
    free = shutil.disk_usage(path).free
    if free < count * size:
        there, needed = (scaled(number, 1000, DECIMAL, digits=3) for number in (free, count * size))
        take = "two checkpoints of this model take" if count == 2 else "the next checkpoint takes"
        raise UserError(
            f"the disk of {path} has {there} free, but {take} {needed}. Free some space, or choose another --run_dir"
            " DIR"
        )


@contextlib.contextmanager
def disk_errors_are_told(path: Path) -> Iterator[None]:
    """Turns the many errors with which libraries report a full disk into one `UserError`, and other disk errors of a
    file in the folder `path` into one that names the file."""
    try:
        yield
    except Exception as error:
        if says_disk_is_full(error):
            raise UserError(
                f"the disk of {path} is full. Free some space and run the same command again: the run resumes from its"
                " newest complete checkpoint"
            ) from error
        if isinstance(error, OSError) and _is_below(path, error.filename):
            raise UserError(f"{error.filename} cannot be used: {error.strerror}. Fix it, or remove it") from error
        raise


def _is_below(folder: Path, name: object) -> bool:
    return isinstance(name, str) and Path(name).resolve().is_relative_to(folder.resolve())


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full. Free some space, or choose another folder with --run_dir DIR"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is a file, not a folder. Choose another folder with --run_dir DIR"
    what = error.strerror or str(error)
    return f"{what}. Choose a writable folder with --run_dir DIR"
