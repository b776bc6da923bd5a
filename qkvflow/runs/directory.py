"""Where the files of a run are stored, and how a run gets its name."""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from qkvflow.errors import UserError, shortened
from qkvflow.files import array_path, is_fresh, scratch_folder
from qkvflow.hub.folder import HubFolder
from qkvflow.places import Place, is_remote
from qkvflow.runs.buckets import bucket_errors_are_told, require_bucket
from qkvflow.runs.mirror import LOCK, Mirror


@dataclass(frozen=True)
class RunDirectory:
    """`<run_dir>/<id>/`: everything that belongs to one run.

    Attributes:
        path: the folder of its small files; of a run in a bucket that which they are worked on in.
        mirror: of a run in a bucket, between the two.
    """

    path: Path
    mirror: Mirror | None = None

    @staticmethod
    def at(location: "str | os.PathLike") -> "RunDirectory":
        """The run directory at a path or a URL; of one in a bucket nothing is read before `pull`.

        Raises:
            UserError: it cannot be a path, or there is no such bucket.
        """
        location = location_of(location)
        if isinstance(location, Path):
            return RunDirectory(location)
        folder = scratch_folder() / location.name
        return RunDirectory(folder, Mirror(location, folder))

    @property
    def location(self) -> Path | Place:
        """Where it is stored, as shown to users."""
        return self.path if self.mirror is None else self.mirror.place

    @property
    def place(self) -> Place:
        """Where it lies."""
        return Place.of(self.location)

    def __str__(self) -> str:
        return str(self.location)

    def pull(self) -> None:
        """Of a run in a bucket: copies its small files here.

        Raises:
            UserError: the bucket cannot be read.
        """
        if self.mirror is not None:
            with bucket_errors_are_told(self.place):
                self.mirror.pull()

    def strangers(self, own: Collection[str]) -> list[str]:
        """The names in the folder that are none of `own`, and that no start writes before there is a `config.yaml`."""
        ours = {*own, self.lock.name, self.tokenizer.name, ".probe", "config.tmp"}  # the last two by older versions
        found = set(self.place.names()) - ours
        return sorted(name for name in found if not (re.fullmatch(r"train(\.\d+)?\.log", name) or is_fresh(name)))

    def push(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Of a run in a bucket: copies there what has changed here.

        Args:
            wanted: which files, by their names.

        Raises:
            UserError: the bucket cannot be written.
        """
        if self.mirror is not None:
            with bucket_errors_are_told(self.place):
                self.mirror.push(wanted)

    @property
    def hub(self) -> HubFolder | None:
        """What lies here, if it is no run but a model in the format of Hugging Face, which is read as a run."""
        is_hub = not self.config.is_file() and HubFolder.is_one(self.path)
        return HubFolder(self.path) if is_hub else None

    @property
    def config(self) -> Path:
        """The configuration, every default filled in."""
        return self.path / "config.yaml"

    @property
    def changes(self) -> Path:
        """Changes of the configuration that the user accepted, one JSON object per line."""
        return self.path / "changes.jsonl"

    @property
    def base(self) -> Path:
        """Of a fine-tune: where its base lies, and what it must be (`qkvflow.runs.base`)."""
        return self.path / "base.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer as a Hugging Face folder."""
        return self.path / "tokenizer" if self.hub is None else self.path

    @property
    def checkpoints(self) -> Place:
        """`step-N/`: the state after step N (the first step is 0)."""
        return self.place / "checkpoints"

    @property
    def damaged(self) -> Place:
        """`step-N/`: checkpoints whose files changed after they were written, kept so that they can be repaired."""
        return self.place / "damaged"

    @property
    def data(self) -> Path:
        """What the training data was when the run began (`qkvflow.runs.data_record`)."""
        return self.path / "data.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        """What libraries have to say to the first process of the run."""
        return self.path / log_name(0)

    @property
    def lock(self) -> Path:
        """Held by the process that trains."""
        return self.path / LOCK


def log_name(index: int) -> str:
    """The name of the log of a process of the run."""
    return f"train.{index}.log" if index else "train.log"


def location_of(name: str | os.PathLike) -> Path | Place:
    """The folder, or the place in a bucket, that a user names.

    Raises:
        UserError: it cannot be a path, there is no such bucket, or it cannot be used.
    """
    if not is_remote(name):
        return array_path(name)
    place = Place.of(name)
    require_bucket(place)
    return place


def run_id(given: str | None, config_path: str | None) -> str:
    """The name of a run: `trainer.id`, or from the configuration file's place below `configs/`.

    `configs/quickstart.yaml` -> `quickstart`; `configs/wikitext103/small.yaml` -> `wikitext103-small`.

    Raises:
        UserError: neither is given, or the name is not one plain path component.
    """
    if given is None:
        if config_path is None:
            raise UserError("the run has no name: give --trainer.id NAME or --config_path FILE")
        parts = list(Path(config_path).with_suffix("").parts)
        below = len(parts) - 1 - parts[::-1].index("configs") if "configs" in parts[:-1] else len(parts) - 2
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[below + 1 :])).strip("-.")
    check_name(given, "`trainer.id`")
    return given


def check_name(name: str, what: str) -> None:
    """Raises:
    UserError: `name` cannot be that of a run; the message says that `what` has it.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}", name):
        raise UserError(
            f"{what} is {shortened(name)!r}, but must be one folder name of letters, digits, `.`, `_` and `-`"
            " that starts with a letter, a digit or `_`"
        )
