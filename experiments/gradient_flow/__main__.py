"""Trains the ODE flow hybrid and a baseline of ordinary layers; measures gradients, solvers and control."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
from levanter.models.lm_model import LmExample
from levanter.utils.jax_utils import parameter_count

from experiments.gradient_flow.norms import component_norms
from experiments.gradient_flow.plan import GradientFlowConfig, arms
from experiments.gradient_flow.readings import Reader, control_effect
from experiments.gradient_flow.report import GradientFlow, GradientFlowProtocol, Trained, draw, page
from experiments.jobs import Job, reported
from experiments.measure import Measure, some_tokens, untrained
from experiments.recipes import Recipe
from experiments.records import six_digits
from experiments.study import Study
from experiments.texts import Text
from qkvflow.data.statistics import unigram_entropy
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

_SEQUENCES = 8  # whose logits are compared: with a large vocabulary the logits of a batch take gigabytes
_CONTROL = "grad/norm/transformer.flow.weights.control.weight"


def make(config: GradientFlowConfig, run_dir: Path) -> GradientFlow:
    text = config.text.prepare(run_dir / "texts")
    systems = arms(config, text, run_dir)
    results = Measure(Trained, config, run_dir, partial(with_readings, config)).all(reported(systems, config.seeds))
    recipe = next(arm.recipe for arm in systems if arm.label == "hybrid")
    hybrid, adam = recipe.config, recipe.config.optimizer
    about = {
        "flow_steps": hybrid.model.depth.steps,
        "alpha": hybrid.model.control.alpha,
        "num_train_steps": recipe.steps,
        "optimizer": f"AdamW, learning rate {adam.learning_rate:g} ({adam.lr_schedule}), weight decay"
        f" {adam.weight_decay:g}, clipped at {adam.max_grad_norm}",
        "weight_decay_on": hybrid.weight_decay_on,
    }
    protocol = GradientFlowProtocol.of(config, text, recipe, **about)
    return GradientFlow(protocol=protocol, unigram=_unigram(recipe, text), results=results)


def with_readings(config: GradientFlowConfig, job: Job, run: Run, evaluator: RunEvaluator) -> dict[str, Any]:
    """Losses and norms of each step; of a middle, other steps; of the hybrid, all other evaluations."""
    metrics, model, system = read_metrics(job.recipe.run.metrics), run.model, job.arm.what.system
    norms = [component_norms(r) for r in metrics]
    found = {
        "loss": [six_digits(r["train/loss"]) for r in metrics],
        "norms": {name: [six_digits(own[name]) for own in norms] for name in norms[0]},
        "clip": run.config.optimizer.max_grad_norm,
        "parameters": parameter_count(model),
    }
    if system == "shallow":
        return found
    tokens = some_tokens(evaluator, _SEQUENCES)
    reader = Reader(model, evaluator.loss, LmExample(tokens, hax.ones(tokens.axes)))
    coarse = () if system == "baseline" else [config.horizon(system) * n for n in config.coarse]
    found["refined"] = reader.refined(config.refinements, coarse)
    if system != "hybrid":
        return found
    draw_key, control_key = jax.random.split(jax.random.PRNGKey(job.seed))
    models = {"trained": model, "untrained": untrained(model, key=draw_key)}
    return found | {
        "readings": reader.by_solvers(config.solvers, config.steps),
        "alpha": float(model.transformer.flow.weights.alpha.array),
        "control_gradient": max((r[_CONTROL] for r in metrics if math.isfinite(r[_CONTROL])), default=math.nan),
        "control": {n: control_effect(m, tokens, config.controls, key=control_key) for n, m in models.items()},
    }


def _unigram(recipe: Recipe, text: Text) -> float:
    """Loss on the part `report` of the unigram frequencies of the part `train`, nats per token."""
    tokenizer = recipe.tokenizer()
    counted = [np.bincount(tokenizer.encode(text.read(p)), minlength=len(tokenizer)) for p in ("train", "report")]
    return unigram_entropy(*counted).nats_per_token


STUDY = Study("gradient_flow", GradientFlowConfig, GradientFlow, make, page, figures=draw)

if __name__ == "__main__":
    STUDY.program()
