"""Opens the directory of a run before any work: new or to be continued, locked, writable, with room."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

import jax

from qkvflow.errors import UserError
from qkvflow.runs.checkpoints import checkpoint_steps, clean_up
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.config_file import differences, read_config, write_config
from qkvflow.runs.directory import RunDirectory, run_id
from qkvflow.runs.lock import hold_lock
from qkvflow.runs.processes import follow, tell_others

C = TypeVar("C", bound=TrainConfig)


@dataclasses.dataclass
class PreparedRun(Generic[C]):
    """An open run directory.

    directory: where its files lie.
    config: the configuration, with the run's name and what an earlier start has settled (vocab_size).
    last_step: last step of the newest checkpoint; -1 if there is none.
    changes: keys that differ from the stored configuration and were accepted.
    """

    directory: RunDirectory
    config: C
    last_step: int
    changes: dict

    def require_space(self, checkpoint_bytes: int) -> None:
        """Refuses a disk without room for two checkpoints (the newest is only deleted after the next)."""
        free = shutil.disk_usage(self.directory.path).free
        if free < 2 * checkpoint_bytes:
            raise UserError(
                f"the disk of {self.directory.path} has {_size(free)} free, but two checkpoints of this "
                f"model take {_size(2 * checkpoint_bytes)}. Make room, or choose another --run_dir DIR"
            )

    def commit(self, config: C) -> None:
        """Writes `config.yaml`; from now on this is a run that can be continued."""
        self.config = config
        if jax.process_index() > 0:
            return
        if self.changes:
            record = {"time": datetime.now().isoformat(timespec="seconds"), "after_step": self.last_step}
            record["changed"] = {key: {"from": old, "to": new} for key, (old, new) in self.changes.items()}
            with open(self.directory.changes, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        write_config(self.directory.config, config)


@contextlib.contextmanager
def prepare_run(config: C) -> Iterator[PreparedRun[C]]:
    """Makes or reopens the run directory `<run_dir>/<trainer.id>`; holds its lock for a `with` block.

    Nothing that an earlier run wrote is changed before all is checked, and a directory that was made here
    disappears again if the block fails before `commit`.

    Errors: `UserError` if the place is not a directory, not writable, full, not empty and not a run, in use
    by another process, if its run is finished, or if its configuration differs in a key that matters.
    """
    name = run_id(config.trainer.id, config.config_path)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, id=name))
    if "://" in str(config.run_dir):
        raise UserError(
            f"`run_dir` is {config.run_dir}, but must be a folder: mount the bucket (gcsfuse, mountpoint-s3) and name"
            " the folder where it is mounted"
        )
    directory = RunDirectory(Path(config.run_dir).expanduser() / name)
    if jax.process_index() > 0:  # one of several processes of a run: the first one makes all checks
        follow(directory.lock)
        yield _follow(directory, config)
        return
    is_new_folder = not directory.path.exists()
    try:
        with contextlib.ExitStack() as stack:
            try:
                prepared = _open(directory, config, stack)
            except UserError:
                tell_others(False)
                raise
            tell_others(True, directory.lock)
            yield prepared
    except UserError:
        if is_new_folder and not directory.config.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def full_disk_is_told(directory: RunDirectory) -> Iterator[None]:
    """Turns the many shapes in which libraries report a full disk into one `UserError`."""
    try:
        yield
    except Exception as error:
        causes = [error, error.__cause__, error.__context__]
        if any(os.strerror(errno.ENOSPC) in str(cause) for cause in causes):
            raise UserError(
                f"the disk of {directory.path} became full. Make room and give the same command again: the "
                "run continues from its newest complete checkpoint"
            ) from error
        raise


def _open(directory: RunDirectory, config: C, stack: contextlib.ExitStack) -> PreparedRun[C]:
    _make_writable(directory)
    stack.enter_context(hold_lock(directory.lock))
    return _reopen(directory, config) if directory.config.exists() else _begin(directory, config)


def _make_writable(directory: RunDirectory) -> None:
    path = directory.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        with open(probe, "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # only this finds a disk that has become full
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            (path / ".probe").unlink(missing_ok=True)
        raise UserError(f"cannot write the run directory {path}: {_reason(error)}") from None


def _begin(directory: RunDirectory, config: C) -> PreparedRun[C]:
    # What a start that failed before `commit` may have left.
    ours = (directory.lock.name, directory.log.name, directory.tokenizer.name)
    found = {entry.name for entry in directory.path.iterdir()}
    strangers = sorted(name for name in found - set(ours) if not name.startswith("train."))
    if strangers:
        raise UserError(
            f"{directory.path} is not a run directory (it has no config.yaml) and is not empty: it holds "
            f"{', '.join(strangers[:5])}. Choose another name with --trainer.id or place with --run_dir"
        )
    return PreparedRun(directory, config, last_step=-1, changes={})


def _follow(directory: RunDirectory, config: C) -> PreparedRun[C]:
    if config.vocab_size is None and directory.config.exists():
        stored = read_config(directory.config, type(config))
        config = dataclasses.replace(config, vocab_size=stored.vocab_size)
    steps = checkpoint_steps(directory.checkpoints)
    return PreparedRun(directory, config, steps[-1] if steps else -1, changes={})


def _reopen(directory: RunDirectory, config: C) -> PreparedRun[C]:
    stored = read_config(directory.config, type(config))
    if config.vocab_size is None:
        config = dataclasses.replace(config, vocab_size=stored.vocab_size)
    changes = differences(stored, config)
    if changes and not config.accept_changes:
        lines = "\n".join(f"  {key}: {_show(old)} there, {_show(new)} given" for key, (old, new) in changes.items())
        raise UserError(
            f"the run {directory.path} was started with another configuration:\n{lines}\n"
            "Nothing was changed. For a new run, add --trainer.id NAME; to continue this one with the new "
            "values, add --accept_changes true"
        )
    steps = checkpoint_steps(directory.checkpoints)
    last_step = steps[-1] if steps else -1
    total = config.trainer.num_train_steps
    if last_step + 1 >= total:
        raise UserError(
            f"the run {directory.path} is finished: it has made {last_step + 1} of {total} steps. Nothing "
            f"was changed. To train it longer, add --trainer.num_train_steps {2 * (last_step + 1)} "
            "--accept_changes true; for a new run, add --trainer.id NAME"
        )
    clean_up(directory.checkpoints)
    return PreparedRun(directory, config, last_step, changes)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full. Make room, or put the run elsewhere with --run_dir DIR"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is a file, not a folder. Choose another place with --run_dir DIR"
    what = error.strerror or str(error)
    return f"{what}. Choose a place where you may write with --run_dir DIR"


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
