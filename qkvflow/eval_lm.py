"""Evaluates a trained run: loss, perplexity and function evaluations, at other depths and with other solvers too.

    python -m qkvflow.eval_lm --run runs/quickstart --steps 4,6,12,24 --solver euler,heun,rk4

prints a table and writes `depth.json` and `depth.png` into `<run>/evaluation/`. Beside the loss stands the relative
displacement ||x(1) - x(0)|| / ||x(0)|| of the flow: a flow that does nothing reads the same at every depth too.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import equinox as eqx
from levanter.models.lm_model import LmExample

import qkvflow as qkvflow  # registers the models
from qkvflow.blocks import Inputs
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.progress import Progress, perplexity
from qkvflow.runs import load_run
from qkvflow.runs.evaluate import RunEvaluator, relative_displacement


@dataclass
class EvalConfig:
    """
    run: the run directory.
    checkpoint_step: N of the checkpoint step-N; the newest by default.
    steps: numbers of steps, `6` or `4,6,12`; as trained by default.
    solver: solvers, `euler` or `euler,rk4`; as trained by default.
    max_eval_batches: of each validation set; all by default.
    batch_size: sequences at a time; as in training by default.
    """

    run: str
    checkpoint_step: int | None = None
    steps: int | str | list[int] | None = None
    solver: str | list[str] | None = None
    max_eval_batches: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Reading:
    """One evaluation. `evaluations`: of the vector field per token, the ordinary layers around it not counted."""

    solver: str
    steps: int
    evaluations: int
    loss: float
    perplexity: float
    displacement: float


def main(config: EvalConfig) -> list[Reading]:
    """Evaluates, prints and writes; returns the readings."""
    steps, solvers = _integers("steps", config.steps), _names(config.solver)
    for solver in solvers:
        solver_by_name(solver)
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            run = load_run(config.run, config.checkpoint_step)
        if not isinstance(run.model, NeuralOdeLMHeadModel):
            if steps or solvers:
                raise UserError(
                    f"{config.run} is no flow but a Levanter model of one depth: leave out steps and solver"
                )
            readings = [_evaluate_ordinary(run, config, progress)]
        else:
            readings = _sweep(run, run.model, steps, solvers, config, progress)
        folder = run.path / "evaluation"
        folder.mkdir(exist_ok=True)
        record = {"checkpoint_step": run.step, "readings": [asdict(r) for r in readings]}
        (folder / "depth.json").write_text(json.dumps(record, indent=2) + "\n")
        if len(readings) > 1:
            _draw(readings, folder / "depth.png")
    print(_table(readings))
    run.directory.push()
    print(f"Written to {run.directory.location / 'evaluation'}")
    return readings


def _sweep(run, model: NeuralOdeLMHeadModel, steps, solvers, config: EvalConfig, progress) -> list[Reading]:
    trained = model.config.depth
    # All readings are asked for before the first is made, so that an impossible one costs nothing.
    models = [
        model.with_depth(trained.on_grid(n, solver=solver))
        for solver in solvers or [trained.solver]
        for n in steps or [trained.reading_steps]
    ]
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


def _draw(readings: list[Reading], path: Path) -> None:
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
        raise UserError(f"{name} must be a whole number or several of them, such as 4,6,12; got {value!r}") from None
    if min(numbers) < 1:
        raise UserError(f"{name} must be at least 1, got {min(numbers)}")
    return numbers


def _names(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return value if isinstance(value, list) else [item.strip() for item in value.split(",")]


if __name__ == "__main__":
    run_program(main, EvalConfig)
