"""A trained flow read by other solvers and in other numbers of steps, without any training."""

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments import jobs
from experiments.rates import Job
from experiments.texts import Text
from qkvflow.eval_lm import read
from qkvflow.runs import load_run


def readings(job: Job, places: Sequence[tuple[str, int]], text: Text, batches: int | None) -> list[dict[str, Any]]:
    """Loss on the first `batches` batches of the part `report`, and displacement, at each of `places` (solver, steps).

    Each is kept beside the run, in `readings/`, so that another place costs one reading.
    """
    path = jobs.directory(job.config).path
    asked = {"report": text.hash("report"), "batches": batches}

    @functools.cache
    def opened():
        run = load_run(path)
        evaluator = jobs.evaluator_on(run, text.file("report"), batches)
        return run.model, evaluator, evaluator.example()

    def make(solver: str, steps: int) -> dict[str, Any]:
        model, evaluator, example = opened()
        return asdict(read(model.with_depth(model.config.depth.on_grid(steps, solver=solver)), evaluator, example))

    return [
        jobs.kept(path / "readings" / f"{solver}-{steps}.json", asked, functools.partial(make, solver, steps))
        for solver, steps in places
    ]
