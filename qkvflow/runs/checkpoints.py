"""The checkpoints of a run: which are complete, which are good, and how to handle the others."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime

from qkvflow.checksums import damage_of
from qkvflow.errors import UserError
from qkvflow.places import Place

Phase = Callable[[str], AbstractContextManager]
Folder = str | os.PathLike | Place
_METADATA = "metadata.json"
_LONG_BYTES = 1 << 30  # reading more than this takes seconds, so a person is told


@dataclass(frozen=True)
class Damaged:
    """A complete checkpoint whose files are not as they were written; `what` is wrong with it."""

    path: Place
    what: str

    def __str__(self) -> str:
        return f"the checkpoint {self.path} is damaged: {self.what}"


def checkpoint_steps(folder: Folder) -> list[int]:
    """The steps N whose checkpoints `step-N` are complete, in order.

    Levanter begins `metadata.json` after all else is on disk, so it marks a complete checkpoint.
    """
    return sorted(step for step, place in _step_folders(folder) if place.has(_METADATA))


def newest_good(
    folder: Folder, phase: Phase | None = None, damage_of: Callable[[Place], str | None] = damage_of
) -> tuple[int | None, list[Damaged]]:
    """The newest complete checkpoint whose files are as they were written, and the damaged ones that are newer.

    Newest is by step: clocks jump. Nothing is changed.

    Args:
        phase: names what is happening if it takes long.
        damage_of: says what is wrong with a complete checkpoint.
    """
    damaged = []
    for step in reversed(checkpoint_steps(folder)):
        place = Place.of(folder) / f"step-{step}"
        is_long = sum(info.bytes for info in place.files().values()) > _LONG_BYTES
        with phase(f"Checking {place.name}") if phase and is_long else contextlib.nullcontext():
            what = damage_of(place)
        if what is None:
            return step, damaged
        damaged.append(Damaged(place, what))
    return None, damaged


def has_checkpoint(folder: Folder) -> bool:
    """Whether this is a checkpoint of Levanter's, or a folder with some."""
    place = Place.of(folder)
    return any(p.has(_METADATA) for p in (place, *(place / name for name in place.folders())))


def sound_checkpoint(path: Folder, damage_of: Callable[[Place], str | None] = damage_of) -> tuple[Place, list[Damaged]]:
    """The checkpoint that `path` means: itself, or the newest good one in it; and the damaged ones that are newer.

    Raises:
        UserError: it is damaged, or all are.
    """
    place = Place.of(path)
    if place.has(_METADATA):
        what = damage_of(place)
        if what is not None:
            raise UserError(f"{Damaged(place, what)}. Use another one")
        return place, []
    step, damaged = newest_good(place, damage_of=damage_of)
    if step is None and damaged:
        raise all_damaged(damaged)
    if step is None:  # not a folder of ours
        return place, []
    return place / f"step-{step}", damaged


def all_damaged(damaged: list[Damaged]) -> UserError:
    """What to tell when no checkpoint is left."""
    lines = "\n".join(f"  {checkpoint.path}: {checkpoint.what}" for checkpoint in damaged)
    return UserError(
        f"no checkpoint can be used, all are damaged:\n{lines}\nNothing was changed. Restore them from a copy, or start"
        " a new run with --trainer.id NAME"
    )


def set_aside(damaged: Damaged, place: Folder) -> Place:
    """Moves a damaged checkpoint into the folder `place`, where no later checkpoint overwrites or removes it."""
    taken = set(Place.of(place).folders())
    name = damaged.path.name
    numbered = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    target = Place.of(place) / next(free for free in numbered if free not in taken)
    damaged.path.move_to(target)
    return target


def clean_up(folder: Folder) -> None:
    """Mends what being killed in the middle of a save leaves: parts of a checkpoint, or empty metadata.

    A checkpoint without `metadata.json` was never complete, and goes. If `metadata.json` is cut short or says
    something else than the folder's name, it is written again: Levanter reads it, nothing else depends on it.
    """
    for step, place in _step_folders(folder):
        if not place.has(_METADATA):
            place.remove()
        elif not _is_sound(place, step):
            record = {"step": step, "timestamp": datetime.now().isoformat(), "is_temporary": False}
            place.write(_METADATA, json.dumps(record).encode())


def keep(folder: Folder, step: int) -> None:
    """Makes a checkpoint permanent, so that Levanter does not remove it when newer ones are there."""
    place = Place.of(folder) / f"step-{step}"
    if _is_sound(place, step):
        record = json.loads(place.read(_METADATA))
        if record.get("is_temporary"):
            place.write(_METADATA, json.dumps(record | {"is_temporary": False}).encode())


def remove_checkpoint(checkpoint: Folder) -> None:
    """Removes a checkpoint, which stops being complete before anything of it is gone."""
    place = Place.of(checkpoint)
    with contextlib.suppress(FileNotFoundError):
        place.remove(_METADATA)
    place.remove()


def _step_folders(folder: Folder) -> list[tuple[int, Place]]:
    place = Place.of(folder)
    numbers = [(name.removeprefix("step-"), name) for name in place.folders() if name.startswith("step-")]
    # As Levanter writes them: step-07 is another folder than step-7.
    return [(int(number), place / name) for number, name in numbers if re.fullmatch("0|[1-9][0-9]{0,18}", number)]


def _is_sound(place: Place, step: int) -> bool:
    try:
        record = json.loads(place.read(_METADATA))
        datetime.fromisoformat(record["timestamp"])
        return record["step"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False
