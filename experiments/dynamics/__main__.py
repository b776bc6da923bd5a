"""Trains flows and ordinary layers, and applies the paper's two analyses, compared with chance."""

from functools import partial
from pathlib import Path

import jax
import numpy as np

from experiments.dynamics.plan import DynamicsConfig, arms
from experiments.dynamics.readings import all_spectra, marks
from experiments.dynamics.report import Dynamics, DynamicsProtocol, Trained, draw, files, page
from experiments.jobs import Job, reported
from experiments.measure import Measure, some_tokens, untrained
from experiments.recipes import value_at
from experiments.study import Study
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run


def make(config: DynamicsConfig, run_dir: Path) -> Dynamics:
    text = config.text.prepare(run_dir / "texts")
    systems = arms(config, text, run_dir)
    results = Measure(Trained, config, run_dir, partial(with_readings, config)).all(reported(systems, config.seeds))
    recipe = systems[0].recipe
    name, rate = value_at(recipe.raw, "optimizer.type", "adam"), recipe.config.optimizer.learning_rate
    about = {
        "flow_steps": recipe.config.model.depth.steps,
        "num_train_steps": recipe.steps,
        "parameters": {arm.label: arm.cost.parameters for arm in systems},
        "optimizer": f"{name}, learning rate {rate:g} for both, not searched for",
    }
    return Dynamics(protocol=DynamicsProtocol.of(config, text, recipe, **about), results=results)


def with_readings(config: DynamicsConfig, job: Job, run: Run, evaluator: RunEvaluator) -> dict[str, object]:
    """Spectra at some checkpoints, and which tokens the scores mark at the end."""
    is_flow, fresh = job.arm.what.system == "flow", untrained(run.model, key=jax.random.PRNGKey(job.seed + 1))
    steps = checkpoint_steps(run.directory.checkpoints)[-config.checkpoints :]
    tokens = np.asarray(some_tokens(evaluator, config.texts).array)[:, : config.length]
    counted = np.bincount(job.recipe.tokenizer().encode(job.arm.text.read("train")), minlength=run.model.Vocab.size)
    rarity = -np.log((counted + 1) / (counted + 1).sum())
    return {
        "spectra": all_spectra(run.model, str(run.path), fresh, steps, is_flow),
        "marks": marks(run.model, fresh, tokens, rarity, is_flow, job.seed),
    }


STUDY = Study("dynamics", DynamicsConfig, Dynamics, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
