"""Opens the directory of a run before any work: new or to be resumed, locked, writable, with free space."""

import contextlib
import dataclasses
import json
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from qkvflow.config import differences, listed, read_config, write_config
from qkvflow.errors import Notice, UserError
from qkvflow.locks import Taken, locked
from qkvflow.places import Place
from qkvflow.runs import data_record, disk
from qkvflow.runs.bucket_lock import BucketLock, held
from qkvflow.runs.buckets import bucket_errors_are_told
from qkvflow.runs.checkpoints import (
    Damaged,
    Phase,
    all_damaged,
    checkpoint_steps,
    clean_up,
    newest_good,
    set_aside,
)
from qkvflow.runs.config import FREE_KEYS, TrainConfig
from qkvflow.runs.directory import RunDirectory, location_of, log_name, run_id
from qkvflow.runs.earlier_start import EarlierStart
from qkvflow.runs.growth import check_depth_goes_on, flag_for_growth
from qkvflow.runs.mirror import LOCK
from qkvflow.runs.processes import damage_found_with_followers, follow, let_others_wait, tell_others

C = TypeVar("C", bound=TrainConfig)
_ATTEMPTS = 10


@dataclasses.dataclass
class PreparedRun(Generic[C]):
    """An open run directory.

    Attributes:
        directory: where its files lie.
        config: the configuration, with the run's name and what an earlier start has settled (vocab_size).
        last_step: step of the newest good checkpoint; -1 if there is none.
        changes: keys that differ from the stored configuration, and data that changed, and were accepted.
        data: what the training data is, see `check_data`.
        lock: of a run in a bucket, in its first process.
        earlier: a start without any step, which `commit` removes; it is put back if the run is not committed.
        is_committed: whether it is a run that can be continued.
        has_begun: whether an earlier start made a step. Without one there is nothing that could differ.
    """

    directory: RunDirectory
    config: C
    last_step: int
    changes: dict
    data: dict[str, str] | None = None
    lock: BucketLock | None = None
    earlier: EarlierStart | None = None
    is_committed: bool = False
    has_begun: bool = True

    def check_data(self, data: dict[str, str]) -> None:
        """Compares the training data with what the run was started with; `commit` writes it down.

        Args:
            data: the files and their content, as `ResolvedDataConfig.record` has them.

        Raises:
            UserError: names the files that differ, unless changes are accepted.
        """
        changes = data_record.changes(self.directory.data, data) if self.has_begun else {}
        if changes and not self.config.accept_changes:
            raise data_record.refusal(str(self.directory), changes)
        self.changes |= {f"data: {name}": change for name, change in changes.items()}
        self.data = data

    def require_space(self, checkpoint_bytes: int) -> None:
        """Refuses a disk without room for two checkpoints (the newest is only deleted after the next); for one, where
        there is one already."""
        if self.directory.mirror is None:
            disk.require_space(self.directory.path, checkpoint_bytes, 2 if self.last_step < 0 else 1)

    def keep(self) -> None:
        """Of a committed run in a bucket: copies there what has changed in its folder on this machine.

        Raises:
            UserError: the bucket cannot be written, or another process has taken over the run.
        """
        index = jax.process_index()
        if not self.is_committed:
            return
        if self.lock is not None:
            self.lock.check()
        self.directory.push(lambda name: index == 0 or name == log_name(index))

    def commit(self) -> None:
        """Writes `config.yaml`; from now on this is a run that can be continued."""
        self.is_committed = True
        if jax.process_index() > 0:
            return
        if self.changes:
            record = {"time": datetime.now().isoformat(timespec="seconds"), "after_step": self.last_step}
            record["changed"] = {key: {"from": old, "to": new} for key, (old, new) in self.changes.items()}
            with open(self.directory.changes, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        # To continue from this file is not to accept changes again.
        write_config(self.directory.config, dataclasses.replace(self.config, accept_changes=False))
        if self.data is not None:
            data_record.write(self.directory.data, self.data)
        if self.earlier is not None:
            self.earlier.remove()
        self.keep()


@contextlib.contextmanager
def prepare_run(config: C, phase: Phase | None = None) -> Iterator[PreparedRun[C]]:
    """Makes or reopens the run directory `<run_dir>/<trainer.id>`; holds its lock for a `with` block.

    Nothing that an earlier run wrote is changed before all is checked, and a directory that was made here disappears
    again if a `UserError` ends the block before `commit`. Checkpoints of an interrupted run are compared with their
    checksums; a damaged one is moved to `damaged/`, and the run continues from the newest good one.

    Args:
        phase: names for people what takes long.

    Raises:
        UserError: the place is not a directory, not writable, full, not empty and not a run, in use by another
            process, if its run is finished, if its configuration differs in a key that matters, or if all its
            checkpoints are damaged.
    """
    config = _named(config)
    directory = RunDirectory.at(location_of(config.run_dir) / str(config.trainer.id))
    if "::" in str(directory.path.absolute()):
        raise UserError(
            f"{directory.path.absolute()} contains `::`, which libraries interpret as two paths. Choose another folder"
        )
    with contextlib.ExitStack() as stack:
        with bucket_errors_are_told(directory.place):
            if jax.process_index() > 0:  # one of several processes of a run: the first one makes all checks
                stack.enter_context(disk.disk_errors_are_told(directory.path))
                follow(directory.place)
                directory.pull()
                prepared = _follow(directory, config)
            else:
                prepared = _lead(directory, config, phase, stack)
        try:
            yield prepared
        except BaseException:
            with contextlib.suppress(UserError):  # what has happened says more
                prepared.keep()
            raise
        prepared.keep()


def _named(config: C) -> C:
    """With the name that its file gives the run, if it has no other."""
    name = run_id(config.trainer.id, config.config_path)
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, id=name))


def _lead(directory: RunDirectory, config: C, phase: Phase | None, stack: contextlib.ExitStack) -> PreparedRun[C]:
    try:
        lock = stack.enter_context(_opened(directory) if directory.mirror is None else _opened_in_bucket(directory))
        stack.enter_context(disk.disk_errors_are_told(directory.path))
        if not directory.config.exists():
            prepared = _begin(directory, config)
        elif has_begun(directory):
            prepared = _reopen(directory, config, phase)
        else:  # it ended before its first step, perhaps because of the configuration that is now another
            earlier, settled = EarlierStart.of(directory, type(config)), config.settled()
            stack.callback(earlier.restore)
            earlier.move()
            prepared = PreparedRun(directory, settled, last_step=-1, changes={}, earlier=earlier, has_begun=False)
        prepared.lock = lock
    except BaseException:
        tell_others(None)
        raise
    tell_others(directory.place)
    return prepared


@contextlib.contextmanager
def _opened_in_bucket(directory: RunDirectory) -> Iterator[BucketLock]:
    """Like `_opened`. Before `commit` nothing but the lock is written to the bucket, which tries whether that works."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(held(directory.place, LOCK, let_others_wait))
        except Taken as taken:
            raise _in_use(directory, taken) from None
        directory.pull()
        yield lock


@contextlib.contextmanager
def _opened(directory: RunDirectory) -> Iterator[None]:
    """The folder, made if it is not there, locked, and tried to write to. Nothing is looked at before it is locked.

    If it was empty, and a `UserError` ends the block before there is a `config.yaml`, it is empty again, or gone if
    made here.
    """
    folder, lock = directory.path, directory.lock
    with contextlib.ExitStack() as stack:
        is_made = False
        with disk.refusals_are_told(folder):
            for attempt in range(_ATTEMPTS):
                try:
                    folder.mkdir(parents=True)
                    is_made = True
                except FileExistsError:
                    with contextlib.suppress(FileNotFoundError):  # another start has just removed it
                        if not stat.S_ISDIR(folder.stat().st_mode):
                            raise
                try:
                    stack.enter_context(locked(lock, wait=False))
                    break
                except FileNotFoundError:  # another start failed just now, and took its folder away
                    if attempt + 1 == _ATTEMPTS:
                        raise
                except Taken as taken:
                    raise _in_use(directory, taken) from None
            was_empty = {entry.name for entry in folder.iterdir()} <= {lock.name}
            disk.write_a_trial(folder)
        try:
            yield
        except UserError:
            if was_empty and not directory.config.exists():
                _empty(folder, lock)
                if is_made:
                    # File by file: once the lock is gone another start may have begun, whose files are its own.
                    with contextlib.suppress(OSError):
                        lock.unlink(missing_ok=True)
                        folder.rmdir()
            raise


def _in_use(directory: RunDirectory, taken: Taken) -> UserError:
    return UserError(
        f"{taken.owner} is training in {directory}. Wait for it, stop it, or give this run its own name with"
        " --trainer.id NAME"
    )


def _empty(folder: Path, lock: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry != lock:
            entry.unlink(missing_ok=True)


def _begin(directory: RunDirectory, config: C) -> PreparedRun[C]:
    strangers = directory.strangers(())
    if strangers:
        raise UserError(
            f"{directory} is not a run directory (it has no config.yaml) and is not empty: it contains"
            f" {', '.join(strangers[:5])}. Choose another name with --trainer.id or another folder with --run_dir"
        )
    return PreparedRun(directory, config.settled(), last_step=-1, changes={})


def has_begun(directory: RunDirectory) -> bool:
    """Whether an earlier start made a step: there is a training loss of any, or a checkpoint, complete or not. What a
    fine-tune says of its base comes before."""
    if directory.checkpoints.names() or directory.damaged.names():
        return True
    if not directory.metrics.is_file():
        return False
    with open(directory.metrics, encoding="utf-8", errors="replace") as lines:
        return any('"train/loss"' in line for line in lines)


def _follow(directory: RunDirectory, config: C) -> PreparedRun[C]:
    begun = has_begun(directory)
    if not directory.config.exists():
        config = config.settled()
    elif begun:
        config = _continued(config, read_config(directory.config, type(config)))
    else:
        config = config.settled()
        if directory.mirror is not None:  # otherwise the first process moves it for all
            EarlierStart(directory).move()
    steps = checkpoint_steps(directory.checkpoints)
    return PreparedRun(directory, config, steps[-1] if steps else -1, changes={}, has_begun=begun)


def _continued(config: C, stored: C) -> C:
    """With what an earlier start has settled, where it is not given."""
    size = stored.vocab_size if config.vocab_size is None else config.vocab_size
    batch = config.trainer.train_batch_size
    batch = stored.trainer.train_batch_size if batch == -1 else batch  # whatever devices there are now
    trainer = dataclasses.replace(config.trainer, train_batch_size=batch)
    return dataclasses.replace(config.settled(stored), vocab_size=size, trainer=trainer)


def _reopen(directory: RunDirectory, config: C, phase: Phase | None) -> PreparedRun[C]:
    stored = read_config(directory.config, type(config))
    config, stored = _continued(config, stored), stored.settled(stored)
    changes = _changes(stored, config)
    if changes and not config.accept_changes:
        raise _started_otherwise(
            directory, changes, "; to continue this one with the new values, add --accept_changes true"
        )
    good, damaged = newest_good(directory.checkpoints, phase, damage_found_with_followers)
    if good is None and damaged:
        raise all_damaged(damaged)
    last_step = -1 if good is None else good
    total = config.trainer.num_train_steps
    if last_step + 1 >= total:
        longer = 2 * (last_step + 1)
        raise UserError(
            f"the run {directory} is finished: it has completed {last_step + 1} of {total} steps. Nothing was changed."
            f" To train it longer, add --trainer.num_train_steps {longer}{flag_for_growth(stored, longer)}"
            " --accept_changes true; for a new run, add --trainer.id NAME"
        )
    check_depth_goes_on(stored, config, last_step)
    for checkpoint in damaged:
        _tell_damage(checkpoint, set_aside(checkpoint, directory.damaged), last_step)
    clean_up(directory.checkpoints)
    return PreparedRun(directory, config, last_step, changes)


def _changes(stored: TrainConfig, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """What differs and may change numbers: keys, and the order of the components, by which Levanter mixes them."""
    changes = differences(stored, config, FREE_KEYS)
    before, now = ([*one.data.components] for one in (stored, config))
    if before != now and {*before} == {*now}:
        changes["data.components"] = (", ".join(before), ", ".join(now))
    return changes


def _started_otherwise(directory: RunDirectory, changes: Mapping[str, tuple[Any, Any]], more: str = "") -> UserError:
    return UserError(
        f"the run {directory} was started with another configuration:\n{listed(changes)}\nNothing was changed. For a"
        f" new run, add --trainer.id NAME{more}"
    )


def check_is_same(directory: RunDirectory, config: TrainConfig) -> None:
    """Raises: UserError: `config` is not that of the finished run in `directory`."""
    stored = read_config(directory.config, type(config))
    changes = _changes(stored.settled(stored), _continued(_named(config), stored))
    if changes:
        raise _started_otherwise(directory, changes)


def _tell_damage(damaged: Damaged, target: Place, last_step: int) -> None:
    text = f"{damaged}. It is kept as {target}; the run resumes from step-{last_step}, the newest good one"
    warnings.warn(Notice(text), stacklevel=2)
