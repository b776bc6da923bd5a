"""The checkpoints of a run: which are complete, which are good, and what to do with the others."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from qkvflow.checksums import damage_of, write_checksums
from qkvflow.errors import UserError
from qkvflow.inside.levanter import checkpoint_of

Phase = Callable[[str], AbstractContextManager]
_LONG_BYTES = 1 << 30  # reading more than this takes seconds, so a person is told


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
            write_checksums(folder, later=["metadata.json"])
            if on_commit_callback is not None:
                on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit, transaction=transaction)


@dataclass(frozen=True)
class Damaged:
    """A complete checkpoint whose files are not as they were written; `what` is wrong with it."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"the checkpoint {self.path} is damaged: {self.what}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps N whose checkpoints `step-N` are complete, in order.

    Levanter begins `metadata.json` after all else is on disk, so it marks a complete checkpoint.
    """
    return sorted(step for step, path in _step_folders(folder) if (path / "metadata.json").is_file())


def newest_good(folder: Path, phase: Phase | None = None) -> tuple[int | None, list[Damaged]]:
    """The newest complete checkpoint whose files are as they were written, and the damaged ones that are newer.

    Newest is by step: clocks jump. Nothing is changed.

    Args:
        phase: names what is happening if it takes long.
    """
    damaged = []
    for step in reversed(checkpoint_steps(folder)):
        path = folder / f"step-{step}"
        is_long = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) > _LONG_BYTES
        with phase(f"Checking {path.name}") if phase and is_long else contextlib.nullcontext():
            what = damage_of(path)
        if what is None:
            return step, damaged
        damaged.append(Damaged(path, what))
    return None, damaged


def has_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint of Levanter's, or a folder with some."""
    places = [path, *path.iterdir()] if path.is_dir() else []
    return any((place / "metadata.json").is_file() for place in places)


def sound_checkpoint(path: Path) -> tuple[Path, list[Damaged]]:
    """The checkpoint that `path` means: itself, or the newest good one in it; and the damaged ones that are newer.

    Errors: `UserError` if it is damaged, or if all are.
    """
    if (path / "metadata.json").is_file():
        what = damage_of(path)
        if what is not None:
            raise UserError(f"{Damaged(path, what)}. Take another one")
        return path, []
    step, damaged = newest_good(path)
    if step is None and damaged:
        raise all_damaged(damaged)
    if step is None:  # not a folder of ours
        return path, []
    return path / f"step-{step}", damaged


def all_damaged(damaged: list[Damaged]) -> UserError:
    """What to tell when no checkpoint is left."""
    lines = "\n".join(f"  {checkpoint.path}: {checkpoint.what}" for checkpoint in damaged)
    return UserError(
        f"no checkpoint can be used, all are damaged:\n{lines}\nNothing was changed. Put them back from a copy, "
        "or begin a new run with --trainer.id NAME"
    )


def set_aside(damaged: Damaged, place: Path) -> Path:
    """Moves a damaged checkpoint into the folder `place`, where no later checkpoint overwrites or removes it."""
    place.mkdir(exist_ok=True)
    number, target = 1, place / damaged.path.name
    while target.exists():
        number += 1
        target = place / f"{damaged.path.name}.{number}"
    os.rename(damaged.path, target)
    return target


def clean_up(folder: Path) -> None:
    """Mends what being killed in the middle of a save leaves: parts of a checkpoint, or empty metadata.

    A checkpoint without `metadata.json` was never complete, and goes. If `metadata.json` is cut short or says
    something else than the folder's name, it is written again: Levanter reads it, nothing else depends on it.
    """
    for step, path in _step_folders(folder):
        metadata = path / "metadata.json"
        if not metadata.exists():
            shutil.rmtree(path)
        elif not _is_sound(metadata, step):
            record = {"step": step, "timestamp": datetime.now().isoformat(), "is_temporary": False}
            metadata.write_text(json.dumps(record))


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix("step-"), path) for path in folder.glob("step-*") if path.is_dir()]
    # As Levanter writes them: `isdigit` is also true of a superscript, and step-07 is another folder than step-7.
    return [(int(number), path) for number, path in names if re.fullmatch("0|[1-9][0-9]{0,18}", number)]


def _is_sound(metadata: Path, step: int) -> bool:
    try:
        record = json.loads(metadata.read_text())
        datetime.fromisoformat(record["timestamp"])
        return record["step"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False
