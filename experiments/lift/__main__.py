"""Trains a model, converts it to flows with fewer weights, and heals them, against the model with dropped layers."""

from pathlib import Path

from experiments.at_work import at_work
from experiments.jobs import Job, reported
from experiments.lift import report
from experiments.lift.plan import LiftStudyConfig, healed, make_runs, trained
from experiments.lift.report import Lifted, Trained
from experiments.measure import Measure
from experiments.study import Study
from qkvflow.locks import locked
from qkvflow.runs import load_run
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run


def make(config: LiftStudyConfig, run_dir: Path) -> Lifted:
    text = config.text.prepare(run_dir / "texts")
    base = trained(config, text, run_dir)
    first = healed(config, base, config.seeds[0], run_dir)  # wrong keys are told before anything is trained
    measure = Measure(Trained, config, run_dir, _before)
    results = measure.all(reported([base], config.seeds))
    for seed in config.seeds:
        jobs = healed(config, base, seed, run_dir)
        if len(measure.those(jobs, lambda job: False)) < len(jobs):
            # For one process at a time: others find the runs there.
            with at_work(run_dir), locked(run_dir / f"made-seed{seed}.lock", wait=True):
                make_runs(config, base, seed, run_dir)
        results += measure.all(jobs)
    costs = {"trained": base.cost.parameters}
    costs |= {job.arm.label: job.arm.cost.parameters for job in first}
    healing = first[0].recipe
    protocol = report.LiftProtocol.of(config, text, base.recipe, steps=base.recipe.steps, healing=healing.steps)
    return Lifted(protocol=protocol, parameters=costs, results=results)


def _before(job: Job, run: Run, evaluator: RunEvaluator) -> dict[str, float]:
    """The loss before healing."""
    made = job.recipe.raw.get("run")
    return {} if made is None else {"before": evaluator.loss(load_run(made).model)}


STUDY = Study("lift", LiftStudyConfig, Lifted, make, report.page, report.files, report.draw)

if __name__ == "__main__":
    STUDY.program()
