"""A start that ended before its first step: the next one in its folder may have another base and another tokenizer."""

import os
import shutil
from pathlib import Path
from typing import Self

from qkvflow.config import read_config
from qkvflow.data.tokenizers import ORIGIN_FILE, TOKENIZER_FILES
from qkvflow.errors import UserError
from qkvflow.files import fresh_name, is_fresh
from qkvflow.runs.buckets import bucket_errors_are_told
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory


class EarlierStart:
    """What it says of its base and its tokenizer: moved out of the way of the next start, which keeps or removes it."""

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._moved: dict[Path, Path | None] = {}  # where each was, and where it is now; None if there was none

    @classmethod
    def of(cls, directory: RunDirectory, config_class: type[TrainConfig]) -> Self:
        """That in a folder with a `config.yaml`; nothing is changed yet.

        Raises:
            UserError: the folder is not that of a run.
        """
        try:
            stored = read_config(directory.config, config_class)
        except UserError as error:
            raise _no_run(directory, str(error)) from None
        if stored.vocab_size is None:  # a run that writes its configuration knows it
            raise _no_run(directory, "its config.yaml was not written by a run")
        own = {directory.config, directory.changes, directory.base, directory.tokenizer, directory.data}
        own |= {directory.metrics, directory.tensorboard}
        names = {path.name for path in own} | {directory.checkpoints.name, directory.damaged.name}
        names |= {"artifacts", "profiler", "wandb"}  # of Levanter
        strangers = directory.strangers(names) + _strangers_of_tokenizer(directory.tokenizer)
        if strangers:
            raise _no_run(directory, f"it contains {', '.join(strangers[:5])}")
        return cls(directory)

    def move(self) -> None:
        """Out of the way."""
        for path in (self._directory.base, self._directory.tokenizer):
            aside = path.with_name(fresh_name(path.name)) if os.path.lexists(path) else None
            if aside is not None:
                os.replace(path, aside)
            self._moved[path] = aside

    def restore(self) -> None:
        """Back, in place of what the next start wrote, unless it is removed."""
        for path, aside in self._moved.items():
            _remove(path)
            if aside is not None:
                os.replace(aside, path)
        self._moved = {}

    def remove(self) -> None:
        """For good.

        Raises:
            UserError: the bucket cannot be written.
        """
        moved, self._moved = self._moved, {}
        for aside in moved.values():
            if aside is not None:
                _remove(aside)
        if self._directory.mirror is not None:
            place, base = self._directory.place, self._directory.base.name
            with bucket_errors_are_told(place):
                if place.has(base):
                    place.remove(base)
                (place / self._directory.tokenizer.name).remove()


def _strangers_of_tokenizer(folder: Path) -> list[str]:
    """The files in the folder of a tokenizer that no run writes there."""
    found = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    strangers = set(found) - {*TOKENIZER_FILES, ORIGIN_FILE}
    return sorted(f"{folder.name}/{name}" for name in strangers if not (is_fresh(name) or name.startswith(".making-")))


def _no_run(directory: RunDirectory, why: str) -> UserError:
    return UserError(
        f"{directory} is not a run directory: {why}. Nothing was changed. Choose another name with --trainer.id or"
        " another folder with --run_dir"
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
