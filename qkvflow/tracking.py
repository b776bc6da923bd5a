"""Metrics of a run: one JSON line per step, TensorBoard, and any trackers that the user adds."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from levanter.tracker import CompositeTracker, NoopTracker, Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig, TensorboardTracker

from qkvflow.errors import UserError
from qkvflow.files import write_text
from qkvflow.inside.tensorboard import on_os_errors

logger = logging.getLogger(__name__)

# JSON has no such numbers; as text they survive, and `read_metrics` gives them back as numbers.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in the order of their steps. Lines that are no record are left out, such as the
    last one of a process that was killed while it wrote.
    """
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            continue
        records.append({key: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for key, v in record.items()})
    return records


class JsonlTracker(Tracker):
    """Appends one JSON object per step to a file: `{"step": 3, "train/loss": 2.5, ...}`.

    All metrics of a step are merged into one record, written by `flush` or when the next step begins. Each
    step has one record: opening the file drops the records after `last_step`, which a resumed run makes again.
    """

    name = "jsonl"

    def __init__(self, path: str | Path, last_step: int | None = None):
        """
        Args:
            path: the file; made if it does not exist.
            last_step: the last step whose record is kept; None keeps all, -1 none.
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = read_metrics(self._path) if self._path.exists() else []
        if last_step is not None:
            kept = [record for record in kept if record["step"] <= last_step]
        write_text(self._path, "".join(_line(record) for record in kept))
        self._file = open(self._path, "rb+")  # noqa: SIM115 (closed by `finish`)
        self._start = self._file.seek(0, os.SEEK_END)  # where the current record begins
        self._step = kept[-1]["step"] if kept else -1
        self._record: dict[str, Any] | None = None
        self._is_written = True

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        if step is None:
            return
        step = int(step)
        if step > self._step:
            self.flush()
            self._start = self._file.seek(0, os.SEEK_END)
            self._step, self._record = step, {"step": step}
        elif self._record is None or step < self._step:
            logger.warning("metrics of step %d came after those of step %d and are not recorded", step, self._step)
            return
        self._record.update(_scalars(metrics))
        self._is_written = False

    def flush(self) -> None:
        """Writes the record of the current step; later metrics of the same step replace it."""
        if self._is_written or self._record is None:
            return
        self._file.seek(self._start)
        self._file.truncate()
        self._file.write(_line(self._record).encode())
        self._file.flush()
        self._is_written = True

    def sync(self) -> None:
        """Puts all that was flushed on the disk itself, where a power cut does not reach it."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self.flush()
        self._file.close()

    # The file holds metrics by step and nothing else: settings stand in the run's config.yaml.
    def log_hyperparameters(self, hparams: dict[str, Any]) -> None: ...

    def log_summary(self, metrics: dict[str, Any]) -> None: ...

    def log_artifact(self, artifact_path, *, name: str | None = None, type: str | None = None) -> None: ...


@TrackerConfig.register_subclass("jsonl")
@dataclass
class JsonlConfig(TrackerConfig):
    """`{type: jsonl, path: FILE}`: see `JsonlTracker`."""

    path: str = "metrics.jsonl"
    last_step: int | None = None

    def init(self, run_id: str | None) -> Tracker:
        # Of several processes of a run the first one writes.
        return JsonlTracker(self.path, self.last_step) if jax.process_index() == 0 else NoopTracker()


class _Tensorboard(TensorboardTracker):
    """Differs from Levanter: hyperparameters are not logged, since each call makes a sub-run of its own.

    Nor does it stand still for ever when its disk is full: there tensorboardX loses the thread that empties its
    queue, and the next metric waits for room in it. Here the thread goes on, without what cannot be written.
    """

    def __init__(self, writer: Any):
        super().__init__(writer)
        on_os_errors(writer, lambda error: logger.warning("TensorBoard's file cannot be written: %s", error))

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None: ...


class RunTracker(CompositeTracker):
    """The trackers of a run together; `flush` puts the current step on disk."""

    def __init__(self, jsonl: JsonlTracker | None, others: list[Tracker]):
        super().__init__([*([jsonl] if jsonl else []), *others])
        self._jsonl = jsonl

    def flush(self) -> None:
        # Not through the members' common path, which swallows errors: a full disk must be seen.
        if self._jsonl is not None:
            self._jsonl.flush()

    def sync(self) -> None:
        """Makes what was flushed outlast a power cut."""
        if self._jsonl is not None:
            self._jsonl.sync()


def start_trackers(
    metrics: Path,
    tensorboard: Path,
    last_step: int,
    extra: TrackerConfig | Sequence[TrackerConfig],
    run_id: str,
) -> RunTracker:
    """Opens `metrics.jsonl`, TensorBoard and the user's own trackers.

    Args:
        metrics, tensorboard: the file and the folder of the run.
        last_step: last completed step of the checkpoint that the run continues from; -1 for a new run.
        extra: `trainer.tracker` of the configuration; added to the run's own trackers.
        run_id: name of the run, for trackers that show it.

    Raises:
        UserError: one of the user's trackers cannot start (W&B without a key, say).
    """
    jsonl, others = None, []
    if jax.process_index() == 0:
        jsonl = JsonlTracker(metrics, last_step)
        writer = TensorboardConfig(logdir=str(tensorboard), purge_step=last_step + 1).init(None).writer
        others.append(_Tensorboard(writer))
    for config in extra if isinstance(extra, Sequence) else [extra]:
        try:
            with wandb_files_in(metrics.parent):
                others.append(config.init(run_id))
        except Exception as error:
            kind, reason = type(config).__name__, str(error).rstrip(".")
            raise UserError(
                f"the tracker of `trainer.tracker` ({kind}) could not start: {reason}. Fix its settings or leave it"
                " out: metrics.jsonl and TensorBoard are always written"
            ) from error
    return RunTracker(jsonl, others)


@contextlib.contextmanager
def wandb_files_in(folder: Path) -> Iterator[None]:
    """W&B runs that begin in a `with` block keep their files in `folder/wandb`, unless the user's WANDB_DIR says else.

    Differs from Levanter, which leaves it to W&B, which writes where the program happens to stand.
    """
    before = os.environ.get("WANDB_DIR")
    os.environ.setdefault("WANDB_DIR", str(folder.absolute()))
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_DIR"]


def _scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers and texts among the metrics, as plain Python values; histograms go to TensorBoard only."""
    plain = {}
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            plain.update(_scalars(value, f"{name}/"))
            continue
        if hasattr(value, "item") and getattr(value, "size", 1) == 1:
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
    return plain


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
