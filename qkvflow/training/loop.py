"""The loop over training steps: logging, validation, checkpoints, stopping. The step itself is Levanter's."""

import bisect
import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import levanter.callbacks
from levanter.callbacks import StepInfo, log_performance_stats, log_step_info
from levanter.schedule import BatchSchedule
from levanter.tracker import CompositeTracker, Tracker, capture_time
from levanter.trainer_state import TrainerState

from qkvflow.errors import UserError
from qkvflow.progress import Progress
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.prepare import PreparedRun
from qkvflow.tracking import RunTracker, read_metrics
from qkvflow.training.checkpointer import create_checkpointer
from qkvflow.training.finite import BadSteps, FiniteTrainer, TooManyBadSteps, data_position, stopped_at
from qkvflow.training.hooks import StepHooks
from qkvflow.training.stopping import StopRequest
from qkvflow.training.validation import Validation

_NAN = "not a number (NaN)"
_TOTAL_GFLOPS = "throughput/total_gflops"
# A training as a sequence of questions: it yields the batch of each step, and is sent what the step made of it, or the
# error by which it failed. So one training, and several at once (together.py), share this loop.
Training = Generator[Any, StepInfo, "Outcome"]


@dataclass(frozen=True)
class Stages:
    """The stages of a training; one, unless the depth of the model grows.

    Attributes:
        first_steps: the step (counted from 0) with which each begins.
        depth_steps: of the solver in each; None where there is no such number.
        flops_per_example: of a training step, forward and backward; None where it is not known.
    """

    first_steps: tuple[int, ...]
    depth_steps: tuple[int | None, ...]
    flops_per_example: tuple[float | None, ...]

    def at(self, step: int) -> int:
        """The stage that the step (counted from 0) belongs to."""
        return bisect.bisect_right(self.first_steps, step) - 1

    def flops(self, steps: int, schedule: BatchSchedule) -> float:
        """FLOPs of the first `steps` training steps: each example counts as its stage does, 0 if that is not known."""
        offsets = [schedule.global_data_offset_by_step(min(step, steps)) for step in (*self.first_steps, steps)]
        examples = (end - begin for begin, end in itertools.pairwise(offsets))
        return sum(n * (flops or 0.0) for n, flops in zip(examples, self.flops_per_example, strict=True))


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        step: the last step that was made; None if it was stopped before its first.
        loss: its training loss; None without a step.
        validation_loss: after the last step; None without validation text, or if stopped before the end.
        exit_status: 0, or that of the signal that stopped it.
        skipped: steps of this process that were not finite and changed nothing.
    """

    step: int | None
    loss: float | None
    validation_loss: float | None
    exit_status: int
    skipped: int = 0


def alone(trainer: FiniteTrainer, state: TrainerState, training: Training) -> Outcome:
    """Makes the steps of one training from `state`, by its own trainer."""
    with contextlib.closing(training):
        try:
            batch = next(training)
            while True:
                try:
                    info = trainer.train_step(state, batch)
                except RuntimeError as error:
                    batch = training.throw(error)
                else:
                    state = info.state
                    batch = training.send(info)
        except StopIteration as end:
            return end.value


def train(
    trainer: FiniteTrainer,
    done: int,
    batches: Iterable,
    *,
    stop: StopRequest,
    validation: Validation,
    tracker: RunTracker,
    run: PreparedRun,
    progress: Progress,
    tokens_per_example: int,
    stages: Stages,
    unigram: float | None,
    max_skipped_steps: int = 0,
    sequences_per_epoch: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Training:
    """Trains from step `done` to `trainer.config.num_train_steps`; whoever drives it makes the steps (`alone`).

    Differs from Levanter's `Trainer.train`: every step is logged (Levanter leaves out the first two), and
    a step's metrics are on disk before the checkpoint of that step begins, so that none is lost when the
    process is killed and the run continued.

    Args:
        done: the number of steps made before.
        clock: of `save_interval`, in seconds since any beginning.

    Raises:
        UserError: the loss is not finite (in more than `max_skipped_steps` steps in a row) or the data ends.
    """
    config = trainer.config
    total, batches = config.num_train_steps, iter(batches)
    log_loss = log_step_info(total)
    speeds = [
        log_performance_stats(tokens_per_example, config.batch_schedule, flops) for flops in stages.flops_per_example
    ]
    trainer.stage = stages.at(done)
    checkpointer = create_checkpointer(config.checkpointer, clock)
    checkpointer.before_saving = run.keep
    bad_steps = BadSteps(max_skipped_steps, _skipped_before(run, done) if max_skipped_steps else 0)
    _add_hooks(trainer)

    def log_speed(info: StepInfo) -> None:
        total = stages.flops(info.next_step, config.batch_schedule) / 1e9
        with levanter.tracker.current_tracker(_TotalOfStages(tracker, total)):
            speeds[trainer.stage](info)

    def next_step() -> Generator[Any, StepInfo, StepInfo]:
        with capture_time() as loading:
            try:
                batch = next(batches)
            except StopIteration:
                raise UserError(f"the training data ended after step {done - 1}, before step {total}") from None
        try:
            info = yield batch
            levanter.tracker.log({"throughput/loading_time": loading()}, step=info.step)
            if bad_steps.see(info.loss):
                levanter.tracker.log({"train/skipped_step": 1}, step=info.step)
            return info
        except (RuntimeError, TooManyBadSteps) as error:
            what = {"Loss is Inf": "infinite", "Loss is NaN": _NAN}.get(str(error))
            if what is None and not isinstance(error, TooManyBadSteps):
                raise
            checkpointer.wait_until_finished()  # the newest may still be on its way to the disk
            saved = checkpoint_steps(run.directory.checkpoints)
            data = data_position(config.batch_schedule, done, sequences_per_epoch)
            raise stopped_at(done, what or _NAN, data, saved[-1] if saved else None, max_skipped_steps) from None

    def grow(info: StepInfo) -> None:
        """Enters the next stage, and logs by how much the finer grid alone changes the validation loss; without such a
        text the first step of the stage logs how much its training loss differs from that of the step before."""
        before, after = trainer.stage, stages.at(done)
        text = f"step {done}  depth {stages.depth_steps[before]} -> {stages.depth_steps[after]} steps"
        if validation.is_possible:
            progress.busy("validating both depths")
            old, new = (validation.loss(info, stage) for stage in (before, after))
            _log_jump(old, new, info.step)
            text += f"  validation loss {old:.3f} -> {new:.3f}"
        trainer.stage = after
        progress.say(text + "  (compiling)")

    validation_loss = None
    if stop.is_due():  # the signal came while data and model were prepared
        return Outcome(None, None, None, stop.exit_status)
    with progress.phase("Compiling the training step"):
        info = yield from next_step()
    progress.start(done, total)
    is_first, loss_before = True, _logged_loss(run, done - 1) if done in stages.first_steps[1:] else None
    try:
        while True:
            done = info.next_step
            if info.step in stages.first_steps[1:] and loss_before is not None and not validation.is_possible:
                _log_jump(loss_before, info.loss, info.step)
            loss_before = info.loss
            log_loss(info)
            log_speed(info)
            tokens = tokens_per_example * config.batch_schedule.batch_size_at_step(info.step)
            # The first step of a process is mostly compilation; its speed says nothing.
            progress.step(done, info.loss, None if is_first else tokens / info.step_duration)
            is_first, is_last = False, done >= total
            # Differs from Levanter: counted in steps made, as the bar counts them, so that the last
            # validation is one of the regular ones if `steps_per_eval` divides `num_train_steps`.
            if validation.is_possible and (is_last or done % config.steps_per_eval == 0):
                progress.busy("validating")
                validation_loss = validation(info)
                progress.validation(done, validation_loss, unigram)
            if not is_last and stages.at(done) != trainer.stage:
                grow(info)  # before the checkpoint, so that whoever continues from it has the record
            tracker.flush()
            is_stopped = stop.is_due() and not is_last
            state = partial(_saveable, tracker, info)
            if is_stopped:
                checkpointer.save_to_continue(state, info.step)
            else:
                checkpointer.on_step(tree=state, step=info.step, force=is_last)
            if is_last or is_stopped:
                break
            info = yield from next_step()
    finally:
        progress.close()
    checkpointer.wait_until_finished()
    return Outcome(
        info.step,
        info.loss,
        validation_loss if is_last else None,
        stop.exit_status if is_stopped else 0,
        bad_steps.total,
    )


def _logged_loss(run: PreparedRun, step: int) -> float | None:
    """The training loss that an earlier process logged in this step; None if there is none."""
    return next((record.get("train/loss") for record in _logged(run) if record["step"] == step), None)


def _skipped_before(run: PreparedRun, done: int) -> int:
    """How many steps in a row, up to the last before step `done`, an earlier process has skipped."""
    # Of several processes, only the first has taken away what follows the checkpoint.
    records = [record for record in _logged(run) if record["step"] < done]
    return len(list(itertools.takewhile(lambda record: record.get("train/skipped_step"), records)))


def _logged(run: PreparedRun) -> list[dict[str, Any]]:
    """The records of earlier processes, the last one first; empty if there are none."""
    try:
        return read_metrics(run.directory.metrics)[::-1]
    except OSError:
        return []


def _log_jump(before: float, after: float, step: int) -> None:
    metrics = {"loss_before": before, "loss_after": after, "loss_jump": after - before}
    levanter.tracker.log({f"depth/{name}": value for name, value in metrics.items()}, step=step)


class _TotalOfStages(CompositeTracker):
    """Passes on what Levanter's hook logs, with another total of FLOPs.

    Differs from Levanter, whose total counts all examples since step 0 as those of the present stage.
    """

    def __init__(self, tracker: Tracker, gflops: float):
        super().__init__([tracker])
        self.gflops = gflops

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        replaced = {_TOTAL_GFLOPS: self.gflops} if _TOTAL_GFLOPS in metrics else {}
        super().log({**metrics, **replaced}, step=step, commit=commit)


def _saveable(tracker: RunTracker, info: StepInfo) -> Any:
    """What a checkpoint holds. Metrics of the steps up to it are not made again, so they must outlast it."""
    tracker.sync()
    return info.state.saveable_state


def _add_hooks(trainer: FiniteTrainer) -> None:
    """Levanter's optional hooks; what its other default hooks do (bar, log, checkpoints) is in the loop."""
    config = trainer.config
    trainer.hooks = StepHooks()
    if config.watch.is_enabled:
        trainer.add_hook(config.watch.build(), every=config.watch.interval)
    profiler = config.profiler
    count = profiler.resolve_num_profile_steps(num_train_steps=config.num_train_steps)
    if profiler.is_enabled and count > 0:
        trainer.add_hook(
            levanter.callbacks.profile(
                str(config.log_dir / trainer.run_id / "profiler"),
                profiler.start_step,
                count,
                profiler.perfetto_link,
                profiler_options=profiler.build_jax_profile_options(),
            ),
            every=1,
        )
