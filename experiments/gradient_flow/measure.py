"""One training and what is read off it: losses, norms by step, readings of the trained model."""

from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.tree_util import Partial
from levanter.models.lm_model import LmExample
from levanter.utils.jax_utils import parameter_count

from experiments import jobs
from experiments.causality import check_causality
from experiments.gradient_flow.config import GradientFlowConfig
from experiments.gradient_flow.control import control_effect, untrained
from experiments.gradient_flow.invariance import refined_readings, solver_readings
from experiments.gradient_flow.norms import component_norms
from experiments.gradient_flow.plan import Job
from experiments.measure import read_training
from experiments.texts import Text
from qkvflow.data.statistics import unigram_entropy
from qkvflow.data.tokenizers import load_tokenizer
from qkvflow.runs import load_run
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

_SEQUENCES = 8  # whose logits are compared: with a large vocabulary those of a batch are gigabytes
_DIGITS = 6
_CONTROL = "grad/norm/transformer.flow.weights.control.weight"


def measure(job: Job, text: Text, config: GradientFlowConfig) -> dict[str, Any]:
    """Trains what is not trained yet. What was found is kept beside the run, in `gradient_flow.json`.

    Returns:
        system, seed; by step `loss` and `norms` (component -> list); `clip`, the limit of the total norm; `curve`:
        [steps done, loss on the part `select`]; `report_loss`; `parameters`; `seconds_per_step`: the median, without
        the first step; and what `_readings` gives.

    Errors: `UserError` if the model sees the future.
    """
    jobs.train(job.config)
    directory = jobs.directory(job.config)
    keys = ("report_batches", "solvers", "steps", "refinements", "controls")
    asked = {"report": text.hash("report"), **{key: getattr(config, key) for key in keys}}

    def read() -> dict[str, Any]:
        metrics = read_metrics(directory.metrics)
        by_step = [component_norms(r) for r in metrics]
        trained, run = read_training(job.config), load_run(directory.path)
        found = {
            "loss": [_round(r["train/loss"]) for r in metrics],
            "norms": {name: [_round(norms[name]) for norms in by_step] for name in by_step[0]},
            "clip": run.config.optimizer.max_grad_norm,
            "curve": trained["curve"],
            "parameters": parameter_count(run.model),
            "seconds_per_step": trained["seconds_per_step"],
        }
        if job.system == "hybrid":
            found["control_gradient"] = max(r[_CONTROL] for r in metrics)
        return found | _readings(job, run, text, config)

    found = jobs.kept(directory.path / "gradient_flow.json", asked, read)
    return {"system": job.system, "seed": job.seed, **found}


def unigram(job: Job, text: Text) -> float:
    """Loss on the part `report` of the frequencies of single tokens in the part `train`, nats per token."""
    tokenizer = load_tokenizer(jobs.directory(job.config).tokenizer)
    train, report = (
        np.bincount(tokenizer.encode(Path(text.file(part)).read_text(encoding="utf-8")), minlength=len(tokenizer))
        for part in ("train", "report")
    )
    return unigram_entropy(train, report).nats_per_token


def _readings(job: Job, run: Run, text: Text, config: GradientFlowConfig) -> dict[str, Any]:
    """On the part `report`: `report_loss`; of hybrid and baseline `refined`; of the hybrid `readings`, `alpha` and
    `control`, of the trained and of an untrained model."""
    evaluator = jobs.evaluator_on(run, text.file("report"), config.report_batches)
    example = _some(evaluator.example())
    model = run.model
    check_causality(Partial(lambda model, tokens: model(tokens), model), example.tokens, job.name)
    found: dict[str, Any] = {"report_loss": evaluator.loss(model)}
    if job.system in ("hybrid", "baseline"):
        found["refined"] = refined_readings(model, config.refinements, evaluator.loss, example)
    if job.system == "hybrid":
        found["readings"] = solver_readings(model, config.solvers, config.steps, evaluator.loss, example)
        found["alpha"] = float(model.transformer.flow.weights.alpha.array)
        draw_key, control_key = jax.random.split(jax.random.PRNGKey(job.seed))
        models = {"trained": model, "untrained": untrained(model, key=draw_key)}
        found["control"] = {
            name: control_effect(one, example.tokens, config.controls, key=control_key) for name, one in models.items()
        }
    return found


def _some(example: LmExample) -> LmExample:
    tokens: NamedArray = example.tokens.rearrange(("batch", "position"))
    some = hax.named(tokens.array[:_SEQUENCES], ("batch", "position"))
    return LmExample(some, hax.ones(some.axes))


def _round(x: float) -> float:
    """Six significant digits: the series are most of the JSON."""
    return float(f"{x:.{_DIGITS}g}")
