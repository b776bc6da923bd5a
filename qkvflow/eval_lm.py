"""Evaluates a trained run: loss, perplexity and function evaluations, also at other depths and with other solvers.

    qkvflow eval --run runs/quickstart --steps 4,6,12,24 --solver euler,heun,rk4
    qkvflow eval --run runs/quickstart --continuity
    qkvflow eval --run runs/quickstart --tasks lambada_openai,piqa --steps 6,12,24
    qkvflow eval --run runs/quickstart --exit '{rule: velocity, threshold: 0.5}'
    qkvflow eval --run runs/quickstart --cache 'latest,every 2'

The first command prints a table and writes `depth.json` and `depth.png` to `<run>/evaluation/`. Next to the loss is the
relative displacement ||x(1) - x(0)|| / ||x(0)|| of the flow: a flow that does nothing has the same loss at every depth.
The others test whether the flow is a solution of its ODE (`continuity.json`), run tasks of lm-evaluation-harness (extra
`eval`; `tasks.json`), and evaluate exits per token (`exits.json`) and shared caches (`cache.json`), each compared with
the full model.
"""

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from levanter.models.lm_model import LmExample

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import Keys, Typed, encode
from qkvflow.config.scalars import show
from qkvflow.depth import solver_by_name
from qkvflow.errors import Notice, UserError
from qkvflow.evaluation.depths import Depths, Reading, draw, read_all, table
from qkvflow.evaluation.shortcuts import caches_table, exits_table, read_caches, read_exits
from qkvflow.evaluation.tasks import TaskOptions, TaskReading, Tasks, check_caches, name_of, task_table
from qkvflow.files import json_text, write_text
from qkvflow.generation.forced import CacheReading, ExitReading
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.continuity import Continuity, continuity, ways
from qkvflow.models.continuity import table as continuity_table
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import CacheSharing
from qkvflow.progress import Progress
from qkvflow.ranges import Count, Positive, Range, Steps, check_range
from qkvflow.runs import Run, load_run
from qkvflow.runs.evaluate import RunEvaluator, on_other_text
from qkvflow.runs.known_loss import warn_if_lost, warn_of_lost


@dataclass
class EvalConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
        averaged: the average of the parameters over steps (`trainer.model_averaging`), instead of the last ones.
        steps: numbers of steps, `6` or `4,6,12`; as trained by default.
        solver: solvers, `euler` or `euler,rk4`; as trained by default.
        max_eval_batches: number of batches of each validation set; all by default.
        batch_size: sequences at a time; as in training by default.
        data: keys that replace those of the run's `data`: `--data.validation FILE` evaluates on another text.
        continuity: is the flow a solution of its ODE? Evaluates it at L, 2L and 4L steps, and with Heun's method and
            RK4 (`qkvflow.models.continuity`); not with `steps` and `solver`, nor for `step_size: residual`.
        tasks: tasks of lm-evaluation-harness, `piqa` or `lambada_openai,piqa`, instead of the loss; `batch_size` then
            counts their texts, 8 by default.
        tasks_folder: folder with YAML files of additional tasks.
        task_limit: maximum number of documents of each task; all by default.
        num_fewshot: examples before each question; by default as the task defines.
        exit: the rule by which tokens stop; with at most one value of `steps` and of `solver`.
        cache: shared caches, `latest`, `every 2` or several, `latest,every 2`; as with `exit`.
        calibrate: nats that exits may cost; searches for the threshold and ignores that of `exit`.
    """

    run: str
    checkpoint_step: int | None = None
    averaged: bool = False
    steps: int | str | list[int] | None = None
    solver: str | list[str] | None = None
    max_eval_batches: Count | None = None
    batch_size: Count | None = None
    data: Keys | None = None
    continuity: bool = False
    tasks: str | list[str] | None = None
    tasks_folder: str | None = None
    task_limit: Count | None = None
    num_fewshot: Annotated[int, Range(at_least=0)] | None = None
    exit: ExitConfig | None = None
    calibrate: Positive | None = None
    cache: str | list[str] | None = None


def main(
    config: EvalConfig,
) -> list[Reading] | Continuity | list[TaskReading] | list[ExitReading] | list[CacheReading]:
    """Evaluates, prints and writes; returns what was found."""
    wanted = Depths(_integers("steps", config.steps), _names(config.solver))
    caches = [CacheSharing.of(name) for name in _names(config.cache)]
    _check(config, wanted)
    if config.tasks is not None:
        return _tasks(config, wanted)
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            run = load_run(config.run, config.checkpoint_step, averaged=config.averaged)
        run = on_other_text(run, config.data or {})
        keys = config.data or {}

        def text() -> list[LmExample]:
            return list(_evaluator(run, config).examples())

        if config.exit is not None:
            model = wanted.flow(run, "only a flow has exits")
            exits = read_exits(model, text, config.exit, progress, config.calibrate)
            _warn_of_lost(run, config, model, exits[0].loss)
            asked = {"exit": encode(config.exit), "calibrate": config.calibrate}
            content = _depth(model) | asked | {"exits": [asdict(r) for r in exits]}
            _tell(run, exits_table(exits), "exits.json", content, config)
            return exits
        if caches:
            model = wanted.flow(run, "only a flow can share its cache")
            shared = read_caches(model, text, caches, progress)
            _warn_of_lost(run, config, model, shared[0].loss)
            content = _depth(model) | {"caches": [asdict(r) for r in shared]}
            _tell(run, caches_table(shared), "cache.json", content, config)
            return shared
        if config.continuity:
            found = _continuity(run, config, progress)
            _tell(run, continuity_table(found), "continuity.json", found.as_json(), config)
            return found
        models = wanted.models(run)  # before any is evaluated, so that an impossible one costs nothing
        readings = read_all(
            run,
            models,
            _evaluator(run, config),
            progress,
            keep=lambda found: _write(run, "depth.json", _sweep(found), config),
        )
        if _other_text(keys) is None:
            warn_of_lost(run, {f"{r.solver} with {r.steps} steps": r.loss for r in readings})
    _tell(run, table(readings), "depth.json", _sweep(readings), config, readings)
    return readings


def _sweep(readings: Sequence[Reading]) -> dict[str, Any]:
    """Readings at several depths, for `depth.json`."""
    return {"readings": [asdict(r) for r in readings]}


def _depth(model: NeuralOdeLMHeadModel) -> dict[str, Any]:
    """Where a flow is evaluated, for files."""
    depth = model.config.depth
    return {"solver": depth.solver, "steps": depth.reading_steps}


def _warn_of_lost(run: Run, config: EvalConfig, model: NeuralOdeLMHeadModel, loss: float) -> None:
    """loss: of the model without exits, with its exact cache."""
    if _other_text(config.data or {}) is None:
        warn_of_lost(run, {name_of(model): loss})


def _check(config: EvalConfig, wanted: Depths) -> None:
    """Raises:
    UserError: a solver that there is not, and flags that do not go together.
    """
    for solver in wanted.solvers:
        solver_by_name(solver)
    if config.continuity and (wanted.steps or wanted.solvers):
        raise UserError("--continuity chooses its own steps and solvers: leave out steps and solver")
    if config.tasks is None:
        given = [k for k in ("tasks_folder", "task_limit", "num_fewshot") if getattr(config, k) is not None]
        if given:
            raise UserError(f"{', '.join(given)} is for tasks: give --tasks NAMES, or leave it out")
    else:
        names = ("continuity", "data", "max_eval_batches", "exit", "calibrate", "cache")
        given = [name for name in names if getattr(config, name)]
        if given:
            raise UserError(f"{', '.join(given)} is for losses, but tasks have their own text: leave it out")
    if config.exit is None and config.calibrate is not None:
        raise UserError("--calibrate searches for the threshold of a rule: also give --exit '{rule: kl, threshold: 0}'")
    several = len(wanted.steps) > 1 or len(wanted.solvers) > 1
    for name in ("exit", "cache"):
        if getattr(config, name) is not None and (config.continuity or several):
            raise UserError(
                f"--{name} evaluates one flow: leave out --continuity, and give at most one value of steps and of"
                " solver"
            )
    if config.exit is not None and _names(config.cache):
        raise UserError("--exit and --cache cannot be combined: leave one of them out")


def _evaluator(run: Run, config: EvalConfig) -> RunEvaluator:
    return RunEvaluator(run, config.batch_size, config.max_eval_batches)


def _tell(
    run: Run,
    shown: str,
    name: str,
    content: dict[str, Any],
    config: EvalConfig,
    readings: Sequence[Reading] = (),
) -> None:
    """Prints a table, writes its content (see `_write`), and says where."""
    print(shown)
    _say_where(run, _write(run, name, content, config, readings))


def _say_where(run: Run, target: Path | None) -> None:
    if target is not None:
        print(f"Written to {run.directory.location / 'evaluation' / target.name}")


def _write(
    run: Run, name: str, content: dict[str, Any], config: EvalConfig, readings: Sequence[Reading] = ()
) -> Path | None:
    """Writes results to the run's folder `evaluation`, with what was read; None, after a warning, if that fails.

    Another text, and averaged parameters, are part of the name. More than one reading is drawn too.
    """
    keys, file = config.data or {}, run.path / "evaluation" / name
    target = _place(file.with_stem(f"{file.stem}-averaged") if config.averaged else file, keys)
    limits = {"max_eval_batches": config.max_eval_batches, "batch_size": config.batch_size}
    read: dict[str, Any] = limits if config.tasks is None else {}
    read |= {"data": _plain(keys)} if _other_text(keys) is not None else {}
    try:
        target.parent.mkdir(exist_ok=True)
        write_text(target, json_text({"checkpoint_step": run.step, "averaged": config.averaged, **read, **content}))
        if len(readings) > 1:
            draw(readings, target.with_suffix(".png"))
        else:
            target.with_suffix(".png").unlink(missing_ok=True)  # of earlier results
        run.directory.push()
        return target
    except OSError as error:
        warnings.warn(Notice(f"the results cannot be written to {target}: {error.strerror}"), stacklevel=1)
        return None


def _tasks(config: EvalConfig, wanted: Depths) -> list[TaskReading]:
    """Runs tasks at each depth, prints and writes what was found."""
    options = TaskOptions(
        _names(config.tasks), config.tasks_folder, config.task_limit, config.num_fewshot, config.batch_size
    )
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase("Looking for the tasks"):
            tasks = Tasks(options)
        with progress.phase(f"Loading {config.run}"):
            run = load_run(config.run, config.checkpoint_step, averaged=config.averaged)
        models, found, target = wanted.models(run), [], None
        check_caches(models)  # before any task is run, so that an impossible depth costs nothing
        for model in models:
            warn_if_lost(run, model, name_of(model))
            with progress.phase(f"Tasks with {name_of(model)}"):
                found.append(tasks.read(run, model))
            target = _write(run, "tasks.json", {"readings": _with_earlier(run, found, config)}, config)
    print(task_table(found))
    _say_where(run, target)
    return found


def _with_earlier(run: Run, found: Sequence[TaskReading], config: EvalConfig) -> list[dict[str, Any]]:
    """The readings, and those that the file has of the same checkpoint: of other tasks, depths and settings."""
    file = run.path / "evaluation" / ("tasks-averaged.json" if config.averaged else "tasks.json")
    asked = {"num_fewshot": config.num_fewshot, "task_limit": config.task_limit, "tasks_folder": config.tasks_folder}
    readings: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # there is no file, or something else
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["checkpoint_step"] == run.step:
            readings = [{**reading, "tasks": {**reading["tasks"]}} for reading in content["readings"]]
    for own in (asdict(reading) | asked for reading in found):
        same = next((one for one in readings if one | {"tasks": None} == own | {"tasks": None}), None)
        if same is None:
            readings.append(own)
        else:
            same["tasks"] |= own["tasks"]
    return readings


def _continuity(run: Run, config: EvalConfig, progress: Progress) -> Continuity:
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        raise UserError(f"{config.run} is not a flow but a Levanter model: --continuity only applies to flows")
    ways(run.model)  # refuses what has no finer grid before any text is read
    evaluator = _evaluator(run, config)
    with contextlib.ExitStack() as phases:

        def step(name: str) -> None:
            phases.close()
            phases.enter_context(progress.phase(name))

        return continuity(run.model, evaluator.example(), evaluator.loss, step=step)


def _place(path: Path, keys: Mapping[str, Any]) -> Path:
    """The file for results on the text that these keys of `data` choose: not that of another text of the same name."""
    text = _other_text(keys)
    if text is None:
        return path
    named, own = path.with_stem(f"{path.stem}-{text}"), _plain(keys)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads(named.read_text(encoding="utf-8")).get("data", own) != own:
            digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:6]
            return named.with_stem(f"{named.stem}-{digest}")
    return named


def _plain(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as JSON has them."""
    plain = {key: value.as_text if isinstance(value, Typed) else value for key, value in keys.items()}
    return json.loads(json.dumps(plain, default=str))


def _other_text(keys: Mapping[str, Any]) -> str | None:
    """A name for the text that these keys of `data` choose; None if they leave the run's own."""
    if not set(keys) - {"auto_build_caches", "cache_dir", "cache_options", "rebuild_caches", "verify_caches"}:
        return None
    given = keys.get("validation", "other")
    first = given.as_text if isinstance(given, Typed) else given[0] if isinstance(given, list) else str(given)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(first).stem)[:100].strip("-.") or "other"


def _integers(name: str, value: int | str | list[int] | None) -> list[int]:
    if value is None:
        return []
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        numbers = [int(item) for item in items]
    except ValueError:
        raise UserError(f"{name} must be a whole number, or several such as 4,6,12; got {show(value)}") from None
    for number in numbers:
        check_range(name, number, Steps)
    return numbers


def _names(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return value if isinstance(value, list) else [item.strip() for item in value.split(",")]


if __name__ == "__main__":
    run_program(main, EvalConfig)
