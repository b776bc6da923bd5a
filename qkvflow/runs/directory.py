"""Where the files of a run lie, and how a run gets its name."""

import re
from dataclasses import dataclass
from pathlib import Path

from qkvflow.errors import UserError, shortened
from qkvflow.files import local_path


@dataclass(frozen=True)
class RunDirectory:
    """`<run_dir>/<id>/`: everything that belongs to one run."""

    path: Path

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
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        """`step-N/`: the state after step N (the first step is 0)."""
        return self.path / "checkpoints"

    @property
    def damaged(self) -> Path:
        """`step-N/`: checkpoints whose files changed after they were written, kept for whoever can mend them."""
        return self.path / "damaged"

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
        """What libraries have to say."""
        return self.path / "train.log"

    @property
    def lock(self) -> Path:
        """Held by the process that trains."""
        return self.path / ".lock"


def folder_of(name: str) -> Path:
    """The folder that `run_dir` names.

    Raises:
        UserError: it is no local folder, or names the home of nobody.
    """
    if "://" in name:
        raise UserError(
            f"`run_dir` is {shortened(name)}, but must be a folder: mount the bucket (gcsfuse, mountpoint-s3) and name"
            " the folder where it is mounted"
        )
    return local_path(name)


def run_id(given: str | None, config_path: str | None) -> str:
    """The name of a run: `trainer.id`, or from the configuration file's place below `configs/`.

    `configs/quickstart.yaml` -> `quickstart`; `configs/wikitext103/small.yaml` -> `wikitext103-small`.

    Errors: `UserError` if neither is given, or if the name is not one plain path component.
    """
    if given is None:
        if config_path is None:
            raise UserError("the run has no name: give --trainer.id NAME or --config_path FILE")
        parts = list(Path(config_path).with_suffix("").parts)
        below = len(parts) - 1 - parts[::-1].index("configs") if "configs" in parts[:-1] else len(parts) - 2
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[below + 1 :])).strip("-.")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}", given):
        raise UserError(
            f"`trainer.id` is {given!r}, but must be one folder name of letters, digits, `.`, `_` and `-` "
            "that begins with a letter or a digit"
        )
    return given
