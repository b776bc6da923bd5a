"""Compares language models fairly: the same text in the same order; at equal steps, FLOPs, parameters or time.

`--only` makes the trainings of some models; `--partial true` none, and shows what `readings` has. `--clock true` times
the steps of all models side by side, with nothing else on the machine, and shows the same.
"""

from pathlib import Path

from experiments.at_work import at_work
from experiments.compare.figures import draw
from experiments.compare.plan import ROWS, CompareConfig
from experiments.compare.record import CompareProtocol, Comparison, Trained
from experiments.compare.report import files, page
from experiments.compare.steps import step_times
from experiments.compare.trainings import Plan
from experiments.cost import with_memory
from experiments.measure import Measure
from experiments.records import this_machine
from experiments.study import Study
from qkvflow.errors import UserError


def make(config: CompareConfig, run_dir: Path) -> Comparison:
    text = config.text.prepare(run_dir / "texts")
    plan, costs = Plan.of(config, text, run_dir), {}
    with at_work(run_dir) as terminal:
        for arm in plan.arms:
            parameters = f"{arm.cost.parameters:,} parameters, {arm.cost.materialised:,} materialised"
            print(f"{arm.label}: {parameters}, {arm.flops:.3g} FLOPs", file=terminal)
        print(*plan.estimate(), sep="\n", file=terminal)
        for arm in plan.arms:
            path = config.kept_in(run_dir) / "costs" / f"{arm.what.system}-d{arm.what.width}.json"
            is_shown = any(row in ROWS for row in arm.what.rows)
            compiles = config.trains(arm.what.system)
            costs[arm.label] = with_memory(arm.cost, arm.recipe, path, compiles) if is_shown else arm.cost
    equal = [arm for arm in plan.arms if "iso_step" in arm.what.rows]
    times = config.kept_in(run_dir) / "costs" / "times.json"
    clock = step_times(equal, times, run_dir, config.clock) if equal else None
    measure = Measure(Trained, config, run_dir, lambda *_: {"machine": str(this_machine())})
    done = plan.carry_out(measure)
    if not done.selection and not done.results:
        raise UserError(
            f"no training is done yet in {config.kept_in(run_dir)}: there is nothing to show. Run"
            " without --partial and --clock, or name the folder by --readings"
        )
    protocol = CompareProtocol.of(config, text, plan.arms[0].recipe, steps=plan.arms[0].recipe.steps)
    return Comparison(protocol=protocol, costs=costs, clock=clock, **vars(done))


STUDY = Study("compare", CompareConfig, Comparison, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
