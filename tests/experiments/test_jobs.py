"""Trainings of experiments: their progress, and that a finished one is taken only for what it is."""

import copy
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from experiments import jobs, texts
from experiments.systems import evaluated, merged, system
from qkvflow.errors import UserError

STANDARD, NEURALODE = (
    Path(__file__).parents[2] / "configs" / "wikitext2" / f"{name}.yaml" for name in ("standard", "neuralode")
)


@dataclass
class Pretended:
    """A training that only takes time."""

    name: str
    minutes: int
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.config = {"name": self.name}


def test_time_left_is_reckoned_from_what_was_trained_now(monkeypatch):
    clock, finished = [0.0], {"found"}
    monkeypatch.setattr(jobs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(jobs, "is_finished", lambda config: config["name"] in finished)

    def result(job: Pretended) -> dict[str, Any]:
        clock[0] += 60 * job.minutes
        finished.add(job.name)
        return {"loss": 1.0}

    planned = [Pretended("found", 30), Pretended("first", 2), Pretended("second", 6)]
    lines = io.StringIO()
    found = jobs.carry_out(planned, result, weight=lambda job: job.minutes, loss="loss", terminal=lines)
    assert found == [{"loss": 1.0}] * 3
    assert lines.getvalue().splitlines() == [
        "1/3  found  loss 1.000  1800 s",
        "2/3  first  loss 1.000  120 s, about 6 min left",
        "3/3  second  loss 1.000  360 s, about 0 min left",
    ]


def test_a_finished_run_is_taken_only_for_what_it_is(tmp_path, monkeypatch):
    """Not with other settings, not evaluated otherwise, not on another text in the same place; moved it is the same."""
    small = {"model": {"hidden_dim": 16, "max_seq_len": 16}, "trainer": {"num_train_steps": 2}}
    text = texts.builtin("topics", tmp_path / "texts")
    raw = evaluated(system(str(STANDARD), small, text, tmp_path / "runs", select_batches=2), 1)
    raw = merged(raw, {"trainer": {"id": "one", "seed": 1}})
    jobs.train(copy.deepcopy(raw))
    assert jobs.is_finished(raw)
    monkeypatch.setattr(jobs.train_lm, "main", lambda config: pytest.fail("a finished run was trained again"))
    jobs.train(raw)
    jobs.train(merged(raw, {"trainer": {"checkpointer": {"save_interval": "9m"}}}))
    for changed in (
        {"trainer": {"train_batch_size": 4}},
        {"trainer": {"num_train_steps": 1}},
        {"trainer": {"steps_per_eval": 1}},
        {"trainer": {"max_eval_batches": 3}},
        {"optimizer": {"learning_rate": 0.5}},
    ):
        with pytest.raises(UserError, match="was made with other settings"):
            jobs.train(merged(raw, changed))
    moved = texts.builtin("topics", tmp_path / "elsewhere")
    jobs.train(merged(raw, {"data": {"train": moved.file("train"), "validation": moved.file("select")}}))
    with open(text.file("train"), "a") as file:
        file.write("one line more\n")
    with pytest.raises(UserError, match=r"train\.txt: .* there, .* given"):
        jobs.train(raw)


@pytest.mark.slow
def test_so_is_a_finished_fine_tune(tmp_path, monkeypatch):
    """What it takes over from its base is not asked for again."""
    text = texts.builtin("topics", tmp_path / "texts")
    small = {"model": {"hidden_dim": 16, "max_seq_len": 16}, "trainer": {"num_train_steps": 2, "id": "base", "seed": 1}}
    base = evaluated(system(str(NEURALODE), small, text, tmp_path / "runs", select_batches=2), 1)
    jobs.train(base)
    tuned = {key: value for key, value in base.items() if key not in ("model", "weight_decay_on")}
    tuned |= {"run": str(tmp_path / "runs" / "base"), "steps": 3, "mode": {"type": "lora"}}
    tuned = merged(tuned, {"trainer": {"id": "tuned"}})
    jobs.train(copy.deepcopy(tuned), is_finetune=True)
    assert jobs.is_finished(tuned)
    monkeypatch.setattr(jobs.finetune_lm, "main", lambda config: pytest.fail("a finished run was trained again"))
    jobs.train(tuned, is_finetune=True)
    for changed in ({"steps": 4}, {"mode": {"r": 2}}):
        with pytest.raises(UserError, match="was made with other settings"):
            jobs.train(merged(tuned, changed), is_finetune=True)
