"""Small studies: their smoke tests, a text, and invented trainings."""

import json
from pathlib import Path

import pytest

from experiments import jobs
from experiments.study import Study
from qkvflow.cli import parse

ROOT = Path(__file__).parents[2]
PARTS = {"train": "one", "select": "two", "report": "three"}
COUNTS = {str(n): 3.0 / n for n in range(1, 6)}
ABOUT = {"counted": 5120, "counts": {"select": COUNTS, "report": COUNTS}}
ABOUT |= {"text": "t", "parts": PARTS, "bytes": dict.fromkeys(PARTS, 1), "tokenizer": "byte", "tokens_per_step": 512}
ORIGIN = {"machine": {"device": "d", "cores": 2, "jax": "0"}, "date": "2026-01-01", "command": "c"}


def smoke(study: Study, **changes):
    """The configuration of a study's smoke test, changed as on its command line."""
    words = [word for key, value in changes.items() for word in (f"--{key}", json.dumps(value))]
    return parse(study.config, study.arguments(["--smoke", *words]))[0]


def refuse_work(monkeypatch) -> None:
    """From now on, any training or measurement of a run fails."""

    def fails(*args, **kwargs):
        pytest.fail("a finished run was trained or read again")

    for program in (jobs.train_lm, jobs.finetune_lm):
        monkeypatch.setattr(program, "main", fails)
    monkeypatch.setattr("experiments.measure.load_run", fails)
