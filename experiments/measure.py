"""One training and what is read off it: losses, times, and the test of causality before any of it is accepted."""

import statistics
from typing import Any

import haliax as hax
from haliax import NamedArray
from jax.tree_util import Partial
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from experiments import jobs
from experiments.causality import check_causality
from experiments.rates import Job
from experiments.texts import Text
from qkvflow.runs import load_run
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

_SEQUENCES = 2  # of the test of causality


def measure(job: Job, text: Text, report_batches: int | None, name: str) -> dict[str, Any]:
    """Trains what is not trained yet. What was found is kept beside the run, in the file `name`.

    Returns:
        `seed`, `learning_rate`, what `read_training` gives, and of reported trainings `report_loss` and `causal_at`,
        the positions of the test.

    Errors: `UserError` if the model sees the future.
    """
    jobs.train(job.config)
    directory = jobs.directory(job.config)
    asked = {"report": text.hash("report"), "batches": report_batches} if job.is_reported else None

    def read() -> dict[str, Any]:
        found = read_training(job.config)
        if not job.is_reported:
            return found
        run = load_run(directory.path)
        tried = causal_at(run, job.name)
        return found | {"causal_at": tried, "report_loss": jobs.loss_on(run, text.file("report"), report_batches)}

    return {"seed": job.seed, "learning_rate": job.rate, **jobs.kept(directory.path / name, asked, read)}


def read_training(config: dict[str, Any]) -> dict[str, Any]:
    """What a finished run wrote while it was trained.

    Returns:
        `curve`: [steps done, loss on the part `select`]; `select_loss`: its end; `seconds_per_step`: the median,
        without the first step of the run if it has more.
    """
    metrics = read_metrics(jobs.directory(config).metrics)
    curve = [[r["step"] + 1, r["eval/loss"]] for r in metrics if "eval/loss" in r]
    seconds = statistics.median(r["throughput/duration"] for r in metrics[1:] or metrics)
    return {"curve": curve, "select_loss": curve[-1][1], "seconds_per_step": seconds}


def causal_at(run: Run, name: str) -> list[int]:
    """The positions at which the model of a run passed the test of causality, on the text that it was watched on.

    Errors: `UserError` if it sees the future.
    """
    tokens = RunEvaluator(run, batch_size=_SEQUENCES, max_batches=1).example().tokens
    some = hax.named(tokens.rearrange(("batch", "position")).array[:_SEQUENCES], ("batch", "position"))
    return check_causality(Partial(_logits, run.model), some, name)


def _logits(model: LmHeadModel, tokens: NamedArray) -> NamedArray:
    """With the mask of training; Levanter's own models have none otherwise."""
    return model(tokens, attn_mask=AttentionMask.causal())
