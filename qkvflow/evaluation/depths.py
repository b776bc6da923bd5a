"""The loss of a trained model at other numbers of steps and with other solvers, and how far its flow moves states."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
from haliax import NamedArray
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.blocks import Inputs
from qkvflow.depth import Solution
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.progress import Progress, perplexity
from qkvflow.runs import Run
from qkvflow.runs.evaluate import RunEvaluator, relative_displacement


@dataclass(frozen=True)
class Reading:
    """One evaluation. `evaluations`: of the vector field per token, the ordinary layers around it not counted."""

    solver: str
    steps: int
    evaluations: int
    loss: float
    perplexity: float
    displacement: float


@dataclass(frozen=True)
class Depths:
    """Which numbers of steps and which solvers; none means as trained."""

    steps: Sequence[int] = ()
    solvers: Sequence[str] = ()

    def models(self, run: Run) -> Sequence[LmHeadModel]:
        """The flow with every solver and number of steps; of an ordinary model itself.

        Raises:
            UserError: a flow has no such depth or solver; depths were named for an ordinary model.
        """
        if not isinstance(run.model, NeuralOdeLMHeadModel):
            if self.steps or self.solvers:
                raise UserError(
                    f"{run.directory} is not a flow but a Levanter model with one depth: leave out steps and solver"
                )
            return [run.model]
        trained = run.model.config.depth
        if trained.is_adaptive and not self.steps and not self.solvers:
            return [run.model]
        return [
            run.model.with_depth(trained.on_grid(n, solver=solver))
            for solver in self.solvers or [trained.solver]
            for n in self.steps or [trained.reading_steps]
        ]

    def flow(self, run: Run, why: str) -> NeuralOdeLMHeadModel:
        """The one flow of at most one number of steps and one solver, without dropout.

        Raises:
            UserError: the run is an ordinary model; `why` says what that lacks.
        """
        if not isinstance(run.model, NeuralOdeLMHeadModel):
            raise UserError(f"{run.directory} is not a flow but a Levanter model: {why}")
        model, trained = run.model, run.model.config.depth
        if self.steps or self.solvers:
            solver = self.solvers[0] if self.solvers else trained.solver
            model = model.with_depth(trained.on_grid(self.steps[0] if self.steps else None, solver=solver))
        return inference_mode(model, True)


def read_all(
    run: Run,
    models: Sequence[LmHeadModel],
    evaluator: RunEvaluator,
    progress: Progress,
    keep: Callable[[Sequence[Reading]], object] = lambda readings: None,
) -> list[Reading]:
    """Evaluates `Depths.models` one after the other.

    Args:
        keep: gets the readings so far, after each of several but the last.
    """
    if not isinstance(run.model, NeuralOdeLMHeadModel):
        return [_read_ordinary(run, evaluator, progress)]
    example = evaluator.example()
    readings = []
    for model in models:
        depth = model.config.depth
        with progress.phase(f"{depth.solver}, {'adaptive' if depth.is_adaptive else depth.steps} steps"):
            readings.append(read(model, evaluator, example))
        if len(readings) < len(models):
            keep(readings)
    return readings


def read(model: NeuralOdeLMHeadModel, evaluator: RunEvaluator, example: LmExample) -> Reading:
    """A flow as it stands: its loss on the evaluator's text, its displacement on `example`; if its steps are adaptive,
    also their number and that of evaluations there.

    Raises:
        UserError: an adaptive solver does not reach t = 1.
    """
    depth, (x0, solution) = model.config.depth, _solved(model, example)
    arrived = solution.statistics is None or bool(solution.statistics.successful)
    loss = evaluator.loss(model) if arrived else math.nan  # NaN, too, if another part of the text does not arrive
    if depth.is_adaptive and not math.isfinite(loss):
        raise UserError(
            f"{depth.solver} did not reach t = 1 within depth.max_steps, or the states are not finite: raise"
            " depth.max_steps, or loosen depth.rtol and depth.atol."
        )
    steps, evaluations = depth.reading_steps, model.config.plan.evaluations
    if solution.statistics is not None:
        steps = int(solution.statistics.steps - solution.statistics.rejected)
        evaluations = int(solution.statistics.evaluations)
    moved = relative_displacement(x0, solution.end)
    return Reading(depth.solver, steps, evaluations, loss, perplexity(loss), moved)


def _read_ordinary(run: Run, evaluator: RunEvaluator, progress: Progress) -> Reading:
    with progress.phase("Evaluating"):
        loss = evaluator.loss(run.model)
    layers = run.config.model.num_layers
    return Reading("-", layers, layers, loss, perplexity(loss), float("nan"))


def displacement(model: NeuralOdeLMHeadModel, example: LmExample) -> float:
    """||x(1) - x(0)|| / ||x(0)|| of the flow on an example, x(0) after the prelude."""
    x0, solution = _solved(model, example)
    return relative_displacement(x0, solution.end)


@eqx.filter_jit
def _solved(model: NeuralOdeLMHeadModel, example: LmExample) -> tuple[NamedArray, Solution]:
    inputs = Inputs.of_example(example)
    x0 = model.embeddings(example.tokens, pos_ids=inputs.pos_ids)
    if model.transformer.prelude is not None:
        x0 = model.transformer.prelude(x0, inputs)
    return x0, model.transformer.flow.solve(x0, inputs)


def table(readings: Sequence[Reading]) -> str:
    lines = [f"{'solver':<9}{'steps':>6}{'evaluations':>13}{'loss':>9}{'perplexity':>12}{'displacement':>14}"]
    lines += [
        f"{r.solver:<9}{r.steps:>6}{r.evaluations:>13}{r.loss:>9.4f}{r.perplexity:>12.3f}{r.displacement:>14.3f}"
        for r in readings
    ]
    return "\n".join(lines)


def draw(readings: Sequence[Reading], path: Path) -> None:
    """Loss and displacement against the evaluations of the field, one curve for each solver, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which takes the backend of the whole program

    figure = Figure((6, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
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
