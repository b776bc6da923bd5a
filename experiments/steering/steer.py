"""One training and how far it can be steered: losses under right, wrong and no control, and samples, judged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import haliax as hax
import numpy as np
from haliax import Axis

import qkvflow
from experiments import jobs
from experiments.measure import causal_at, read_training
from experiments.rates import Job
from experiments.steering.config import SteeringConfig
from experiments.steering.ngrams import Judge
from experiments.steering.records import Control, between, controls, report_records
from experiments.texts import Text
from qkvflow.generation.text import encode_prompt
from qkvflow.runs import load_run
from qkvflow.runs.load import Run

_SHOWN = 2  # samples under each control that go to the results


def steer(job: Job, config: SteeringConfig, texts: Sequence[Text], judge: Judge, run_dir: Path) -> dict[str, Any]:
    """Trains what is not trained yet. What was found is kept beside the run, in `steering.json`.

    Returns:
        `arm`, `seed`, and what `read_training` gives; `causal_at`; `losses` under `right`, `wrong` and `none`, the mean
        of both texts' parts `report`; `report_loss`: that under `right`; `judged_b`: share of the samples that is
        judged as text B, for each u of `between` and for `none`; `accuracy`: of u = 0 and u = 1; `examples` of samples.

    Errors: `UserError` if the model sees the future.
    """
    jobs.train(job.config)
    path = jobs.directory(job.config).path
    hashes = {text.name: [text.hash(part) for part in ("select", "report")] for text in texts}

    def read() -> dict[str, Any]:
        run = load_run(path)
        tried = causal_at(run, job.name)
        losses = {
            kind: float(np.mean([_loss(run, text, index, kind, config, run_dir) for index, text in enumerate(texts)]))
            for kind in controls(0)
        }
        asked = {str(u): between(u) for u in config.between} | {"none": None}
        samples = {name: sample(run, control, job.seed, config) for name, control in asked.items()}
        judged = {name: judge.share_of_b(pieces) for name, pieces in samples.items()}
        found = {
            "causal_at": tried,
            "losses": losses,
            "report_loss": losses["right"],
            "judged_b": judged,
            "accuracy": (1 - judged["0.0"] + judged["1.0"]) / 2,
            "examples": {name: [s.decode("utf-8", "replace") for s in all_[:_SHOWN]] for name, all_ in samples.items()},
        }
        return read_training(job.config) | found

    found = jobs.kept(path / "steering.json", config.settings() | hashes, read)
    return {"arm": job.variant.label, "seed": job.seed, **found}


def sample(run: Run, control: Control | None, seed: int, config: SteeringConfig) -> list[bytes]:
    """Texts under one control, drawn by the same random numbers under each. They begin as a document does.

    The token before them ends a document, which both texts' records do equally often: it tells no source.
    """
    Batch, Pos = Axis("batch", config.samples), Axis("position", 1)
    prompt = hax.named(np.full((Batch.size, 1), encode_prompt(run.tokenizer, ""), np.int32), (Batch, Pos))
    heard = None if control is None else hax.named(np.asarray(control, np.float32), "control")
    text = qkvflow.generate(
        run.model,
        prompt,
        max_new_tokens=config.length,
        temperature=config.temperature,
        seed=seed * config.samples,
        control=heard,
    )
    rows = np.asarray(text.rearrange((Batch, "position")).array)[:, 1:]
    return [bytes(int(token) for token in row if token < 256) for row in rows]


def _loss(run: Run, text: Text, index: int, kind: str, config: SteeringConfig, run_dir: Path) -> float:
    path = run_dir / "records" / f"report-{text.name}-{kind}.jsonl"
    records = report_records(text, controls(index)[kind], path, config.record)
    return jobs.loss_on(run, records, config.report_batches)
