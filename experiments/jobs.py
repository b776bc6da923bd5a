"""Trainings of experiments: each is a run, so that an experiment that is started again continues where it stopped."""

import contextlib
import dataclasses
import io
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import jax

from qkvflow import finetune_lm, train_lm
from qkvflow.cli.quiet import Quiet, quiet_libraries
from qkvflow.config import decode, differences, listed, read_config
from qkvflow.errors import UserError
from qkvflow.runs import RunDirectory, data_record
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.config import FREE_KEYS, FinetuneConfig, TrainConfig
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run
from qkvflow.training.finetune import settle

# What a run that is there may differ in. Where its data lies does not matter (its content is compared); how often it
# was evaluated, and on how much, does: its losses are read off it.
_FREE_KEYS = {*FREE_KEYS, "data.train", "data.validation"} - {"trainer.steps_per_eval", "trainer.max_eval_batches"}


class Job(Protocol):
    """config: what train_lm or finetune_lm is given, with `run_dir`, `trainer.id` and `trainer.num_train_steps`."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Job)


def directory(config: dict[str, Any]) -> RunDirectory:
    return RunDirectory(Path(config["run_dir"]) / config["trainer"]["id"])


def is_finished(config: dict[str, Any]) -> bool:
    steps = checkpoint_steps(directory(config).checkpoints)
    return bool(steps) and steps[-1] + 1 >= config["trainer"]["num_train_steps"]


def train(config: dict[str, Any], is_finetune: bool = False) -> None:
    """Trains, or continues, a run; nothing is printed. A finished run is left as it is.

    Errors: `UserError` if the run in this place, finished or not, was made with other settings or on another text.
    """
    given = decode(FinetuneConfig if is_finetune else TrainConfig, config)
    _check_is_same(directory(config), given)
    if is_finished(config):
        return
    with contextlib.redirect_stdout(io.StringIO()):
        if isinstance(given, FinetuneConfig):
            finetune_lm.main(given)
        else:
            train_lm.main(given)


def _check_is_same(run: RunDirectory, given: TrainConfig) -> None:
    """Errors: `UserError` if there is a run already, and it is another than the one that is asked for."""
    if not run.config.is_file():
        return
    if isinstance(given, FinetuneConfig):
        given, *_ = settle(given)  # with what it takes over from its base
    stored = read_config(run.config, type(given))
    given = dataclasses.replace(given, vocab_size=given.vocab_size or stored.vocab_size)
    changes = differences(stored, given, _FREE_KEYS)
    data = given.data.resolve(run.tokenizer, given.control_dim).record
    changes |= {f"data: {name}": change for name, change in data_record.changes(run.data, data).items()}
    if changes:
        raise UserError(
            f"the run {run.path} was made with other settings:\n{listed(changes)}\nNothing was changed. Give another"
            " --run_dir, or remove this one if its runs are not needed"
        )


def evaluator_on(run: Run, path: str, max_batches: int | None) -> RunEvaluator:
    """Evaluates models of a run on another text than those it was trained and validated with."""
    data = dataclasses.replace(run.config.data, validation=path)
    unseen = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    return RunEvaluator(unseen, max_batches=max_batches)


def loss_on(run: Run, path: str, max_batches: int | None) -> float:
    """Loss of a run's model on another text."""
    return evaluator_on(run, path, max_batches).loss(run.model)


def carry_out(
    jobs: Sequence[J],
    result: Callable[[J], dict[str, Any]],
    *,
    weight: Callable[[J], float],
    loss: str,
    terminal: TextIO,
) -> list[dict[str, Any]]:
    """The results of all jobs, one progress line for each.

    Args:
        result: trains what is not trained yet, and reads the numbers off the run.
        weight: what a job costs, in any unit.
        loss: key of a result that is shown.
    """
    results, spent, worked = [], 0.0, 0.0
    for number, job in enumerate(jobs, 1):
        start, is_new = time.monotonic(), not is_finished(job.config)
        results.append(result(job))
        took = time.monotonic() - start
        if is_new:  # what was found already took no time that tells anything
            worked, spent = worked + weight(job), spent + took
        rest = sum(weight(other) for other in jobs[number:] if not is_finished(other.config))
        left = f", about {rest * spent / worked / 60:.0f} min left" if worked else ""
        print(f"{number}/{len(jobs)}  {job.name}  loss {results[-1][loss]:.3f}  {took:.0f} s{left}", file=terminal)
        jax.clear_caches()
    return results


@contextlib.contextmanager
def at_work(run_dir: Path) -> Iterator[Quiet]:
    """What libraries and programs say goes to `experiment.log` in `run_dir`; the runs share what is compiled."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")
        use_compilation_cache(run_dir / "compiled")
        yield quiet


def use_compilation_cache(folder: Path) -> None:
    """Seeds share their programs; a cached program is the same program, so that no number depends on it."""
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def origin(module: str) -> dict[str, Any]:
    """Where results come from: machine (cores: those that it may use), date, and the command that made them."""
    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": {"device": name, "cores": cores, "jax": jax.__version__},
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def kept(path: Path, asked: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returned when it was last asked for `asked`, from the JSON at `path`; made anew if that differs."""
    asked = json.loads(json.dumps(asked))
    if path.is_file():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a file that a killed process did not finish
            content = json.loads(path.read_text())
            if content["asked"] == asked:
                return content["found"]
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"asked": asked, "found": found}) + "\n")
    return json.loads(json.dumps(found))
