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
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.utils.tree_utils import inference_mode

import qkvflow as qkvflow  # registers the models
from qkvflow.blocks import Inputs
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import Keys, Typed
from qkvflow.config.scalars import show
from qkvflow.depth import solver_by_name
from qkvflow.errors import Notice, UserError
from qkvflow.files import json_text, write_text
from qkvflow.generation.forced import CacheReading, ExitReading, ForcedReader, read_with_cache
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.continuity import Continuity, continuity, table, ways
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing
from qkvflow.progress import Progress, perplexity
from qkvflow.ranges import Count, Positive, Range, Steps, check_range
from qkvflow.runs import Run, load_run
from qkvflow.runs.evaluate import RunEvaluator, on_other_text, relative_displacement
from qkvflow.runs.known_loss import warn_of_lost
from qkvflow.tasks import TaskOptions, TaskReading, Tasks, name_of, task_table


@dataclass
class EvalConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
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


@dataclass(frozen=True)
class Reading:
    """One evaluation. `evaluations`: of the vector field per token, the ordinary layers around it not counted."""

    solver: str
    steps: int
    evaluations: int
    loss: float
    perplexity: float
    displacement: float


def main(
    config: EvalConfig,
) -> list[Reading] | Continuity | list[TaskReading] | list[ExitReading] | list[CacheReading]:
    """Evaluates, prints and writes; returns what was found."""
    steps, solvers = _integers("steps", config.steps), _names(config.solver)
    for solver in solvers:
        solver_by_name(solver)
    if config.continuity and (steps or solvers):
        raise UserError("--continuity chooses its own steps and solvers: leave out steps and solver")
    if config.tasks is None:
        given = [k for k in ("tasks_folder", "task_limit", "num_fewshot") if getattr(config, k) is not None]
        if given:
            raise UserError(f"{', '.join(given)} is for tasks: give --tasks NAMES, or leave it out")
    else:
        return _tasks(config, steps, solvers)
    if config.exit is None and config.calibrate is not None:
        raise UserError("--calibrate searches for the threshold of a rule: also give --exit '{rule: kl, threshold: 0}'")
    caches = [CacheSharing.of(name) for name in _names(config.cache)]
    for name in ("exit", "cache"):
        if getattr(config, name) is not None and (config.continuity or len(steps) > 1 or len(solvers) > 1):
            raise UserError(
                f"--{name} evaluates one flow: leave out --continuity, and give at most one value of steps and of"
                " solver"
            )
    if config.exit is not None and caches:
        raise UserError("--exit and --cache cannot be combined: leave one of them out")
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            run = load_run(config.run, config.checkpoint_step)
        run = on_other_text(run, config.data or {})
        text = _other_text(config.data or {})
        suffix = "" if text is None else f"-{text}"
        if config.exit is not None:
            exits = _exits(run, config.exit, steps, solvers, config, progress)
            return _tell_exits(run, exits, suffix)
        if caches:
            return _tell_caches(run, _caches(run, caches, steps, solvers, config, progress), suffix)
        if config.continuity:
            found = _continuity(run, config, progress)
        else:
            found = _readings(run, steps, solvers, config, progress)
            if text is None:
                warn_of_lost(run, {f"{r.solver} with {r.steps} steps": r.loss for r in found})
    if isinstance(found, Continuity):
        print(table(found))
        _write(run, f"continuity{suffix}.json", found.as_json())
    else:
        print(_table(found))
        _write(run, f"depth{suffix}.json", {"readings": [asdict(r) for r in found]}, found)
    return found


def _write(run: Run, name: str, content: dict[str, Any], readings: Sequence[Reading] = ()) -> None:
    """Into the folder `evaluation` of the run; more than one reading is drawn too."""
    target = run.path / "evaluation" / name
    try:
        target.parent.mkdir(exist_ok=True)
        write_text(target, json_text({"checkpoint_step": run.step, **content}))
        if len(readings) > 1:
            _draw(readings, target.with_suffix(".png"))
        run.directory.push()
        print(f"Written to {run.directory.location / 'evaluation' / name}")
    except OSError as error:
        warnings.warn(Notice(f"the results cannot be written to {target}: {error.strerror}"), stacklevel=1)


def _tasks(config: EvalConfig, steps: list[int], solvers: list[str]) -> list[TaskReading]:
    """Runs tasks at each depth, prints and writes what was found."""
    given = [
        name
        for name in ("continuity", "data", "max_eval_batches", "exit", "calibrate", "cache")
        if getattr(config, name)
    ]
    if given:
        raise UserError(f"{', '.join(given)} is for losses, but tasks have their own text: leave it out")
    options = TaskOptions(
        _names(config.tasks), config.tasks_folder, config.task_limit, config.num_fewshot, config.batch_size
    )
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase("Looking for the tasks"):
            tasks = Tasks(options)
        with progress.phase(f"Loading {config.run}"):
            run = load_run(config.run, config.checkpoint_step)
        found = []
        for model in _flow_or_ordinary(run, steps, solvers):
            with progress.phase(f"Tasks with {name_of(model)}"):
                found.append(tasks.read(run, model))
    print(task_table(found))
    _write(run, "tasks.json", {"readings": [asdict(reading) for reading in found]})
    return found


def _flow_or_ordinary(run: Run, steps, solvers) -> Sequence[LmHeadModel]:
    if isinstance(run.model, NeuralOdeLMHeadModel):
        return _models(run.model, steps, solvers)
    _refuse_depths(run, steps, solvers)
    return [run.model]


def _refuse_depths(run: Run, steps, solvers) -> None:
    if steps or solvers:
        raise UserError(
            f"{run.directory} is not a flow but a Levanter model with one depth: leave out steps and solver"
        )


def _models(model: NeuralOdeLMHeadModel, steps, solvers) -> list[NeuralOdeLMHeadModel]:
    trained = model.config.depth
    return [
        model.with_depth(trained.on_grid(n, solver=solver))
        for solver in solvers or [trained.solver]
        for n in steps or [trained.reading_steps]
    ]


def _readings(run: Run, steps, solvers, config: EvalConfig, progress: Progress) -> list[Reading]:
    if isinstance(run.model, NeuralOdeLMHeadModel):
        return _sweep(run, run.model, steps, solvers, config, progress)
    _refuse_depths(run, steps, solvers)
    return [_evaluate_ordinary(run, config, progress)]


def _exits(run: Run, exits: ExitConfig, steps, solvers, config: EvalConfig, progress: Progress) -> list[ExitReading]:
    """The full model, and the one with exits."""
    model = _one_flow(run, steps, solvers, "only a flow has exits")
    reader = ForcedReader(model, exits)
    examples = list(RunEvaluator(run, config.batch_size, config.max_eval_batches).examples())
    with progress.phase("The full model"):
        full = reader.read(examples, 0.0)
    if config.calibrate is not None:
        with progress.phase(f"Searching for the threshold of {exits.rule}"):
            return [full, reader.calibrate(examples, config.calibrate, full.loss)]
    with progress.phase(f"{exits.rule} below {exits.threshold:g}"):
        return [full, reader.read(examples, exits.threshold)]


def _one_flow(run: Run, steps, solvers, why: str) -> NeuralOdeLMHeadModel:
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        raise UserError(f"{run.directory} is not a flow but a Levanter model: {why}")
    model, trained = run.model, run.model.config.depth
    if steps or solvers:
        solver = solvers[0] if solvers else trained.solver
        model = model.with_depth(trained.on_grid(steps[0] if steps else None, solver=solver))
    return inference_mode(model, True)


def _caches(run: Run, caches, steps, solvers, config: EvalConfig, progress: Progress) -> list[CacheReading]:
    """The exact cache, and each of `caches`."""
    model = _one_flow(run, steps, solvers, "only a flow can share its cache")
    examples = list(RunEvaluator(run, config.batch_size, config.max_eval_batches).examples())
    readings = []
    for sharing in dict.fromkeys([EXACT, *caches]):
        with progress.phase(f"Cache: {sharing}"):
            readings.append(read_with_cache(model, sharing, examples))
    return readings


def _tell_caches(run: Run, readings: list[CacheReading], suffix: str) -> list[CacheReading]:
    print(f"{'cache':<10}{'kept':>6}{'of':>5}{'bytes per token':>17}{'loss':>9}")
    for r in readings:
        print(f"{r.cache:<10}{r.kept:>6}{r.of:>5}{r.bytes_per_token:>17,}{r.loss:>9.4f}")
    _write(run, f"cache{suffix}.json", {"caches": [asdict(r) for r in readings]})
    return readings


def _tell_exits(run: Run, readings: list[ExitReading], suffix: str) -> list[ExitReading]:
    print(f"{'rule':<10}{'threshold':>11}{'evaluations':>13}{'of':>5}{'loss':>9}")
    for r in readings:
        print(f"{r.rule:<10}{r.threshold:>11.4g}{r.evaluations:>13.2f}{r.of:>5}{r.loss:>9.4f}")
    _write(run, f"exits{suffix}.json", {"exits": [asdict(r) for r in readings]})
    return readings


def _continuity(run: Run, config: EvalConfig, progress: Progress) -> Continuity:
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        raise UserError(f"{config.run} is not a flow but a Levanter model: --continuity only applies to flows")
    ways(run.model)  # refuses what has no finer grid before any text is read
    evaluator = RunEvaluator(run, config.batch_size, config.max_eval_batches)
    with contextlib.ExitStack() as phases:

        def step(name: str) -> None:
            phases.close()
            phases.enter_context(progress.phase(name))

        return continuity(run.model, evaluator.example(), evaluator.loss, step=step)


def _other_text(keys: Mapping[str, Any]) -> str | None:
    """A name for the text that these keys of `data` choose; None if they leave the run's own."""
    if not set(keys) - {"auto_build_caches", "cache_dir", "cache_options", "rebuild_caches", "verify_caches"}:
        return None
    given = keys.get("validation", "other")
    first = given.as_text if isinstance(given, Typed) else given[0] if isinstance(given, list) else str(given)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(first).stem)[:100].strip("-.") or "other"


def _sweep(run, model: NeuralOdeLMHeadModel, steps, solvers, config: EvalConfig, progress) -> list[Reading]:
    # All readings are asked for before the first is made, so that an impossible one costs nothing.
    models = _models(model, steps, solvers)
    evaluator = RunEvaluator(run, config.batch_size, config.max_eval_batches)
    example = evaluator.example()
    readings = []
    for model in models:
        depth = model.config.depth
        with progress.phase(f"{depth.solver}, {depth.steps} steps"):
            readings.append(read(model, evaluator, example))
    return readings


def read(model: NeuralOdeLMHeadModel, evaluator: RunEvaluator, example: LmExample) -> Reading:
    """A flow on a fixed grid as it stands: its loss on the evaluator's text, its displacement on `example`."""
    depth, loss = model.config.depth, evaluator.loss(model)
    evaluations, moved = model.config.plan.evaluations, displacement(model, example)
    return Reading(depth.solver, depth.reading_steps, evaluations, loss, perplexity(loss), moved)


def _evaluate_ordinary(run, config: EvalConfig, progress) -> Reading:
    with progress.phase("Evaluating"):
        loss = RunEvaluator(run, config.batch_size, config.max_eval_batches).loss(run.model)
    layers = run.config.model.num_layers
    return Reading("-", layers, layers, loss, perplexity(loss), float("nan"))


def displacement(model: NeuralOdeLMHeadModel, example: LmExample) -> float:
    """||x(1) - x(0)|| / ||x(0)|| of the flow on an example, x(0) after the prelude."""

    @eqx.filter_jit
    def ends(model: NeuralOdeLMHeadModel, example: LmExample):
        inputs = Inputs.of_example(example)
        x0 = model.embeddings(example.tokens, pos_ids=inputs.pos_ids)
        if model.transformer.prelude is not None:
            x0 = model.transformer.prelude(x0, inputs)
        return x0, model.transformer.flow(x0, inputs)

    return relative_displacement(*ends(model, example))


def _table(readings: list[Reading]) -> str:
    lines = [f"{'solver':<9}{'steps':>6}{'evaluations':>13}{'loss':>9}{'perplexity':>12}{'displacement':>14}"]
    lines += [
        f"{r.solver:<9}{r.steps:>6}{r.evaluations:>13}{r.loss:>9.4f}{r.perplexity:>12.3f}{r.displacement:>14.3f}"
        for r in readings
    ]
    return "\n".join(lines)


def _draw(readings: Sequence[Reading], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 6), sharex=True, layout="constrained")
    for solver in dict.fromkeys(r.solver for r in readings):
        own = sorted((r for r in readings if r.solver == solver), key=lambda r: r.evaluations)
        x = [r.evaluations for r in own]
        top.plot(x, [r.loss for r in own], marker="o", label=solver)
        bottom.plot(x, [r.displacement for r in own], marker="o", label=solver)
    top.set_ylabel("validation loss (nats per token)")
    bottom.set_ylabel("displacement ||x(1) - x(0)|| / ||x(0)||")
    bottom.set_xlabel("evaluations of the vector field")
    bottom.set_ylim(bottom=0)
    bottom.set_xscale("log", base=2)
    top.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
