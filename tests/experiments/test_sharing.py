"""Processes that share a study: every training is made once, by one of them, and each has all results."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from experiments import sharing
from experiments.sharing import in_turn
from experiments.study import FOLDER
from qkvflow.locks import locked

ROOT = FOLDER.parent


def test_what_another_holds_comes_last_when_it_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "_SECONDS_BETWEEN_LOOKS", 0.01)
    told, release, held = [], threading.Event(), threading.Event()

    def hold() -> None:
        with locked(tmp_path / "b.lock", wait=False):
            held.set()
            release.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()

    def waits(number: int) -> bool:
        told.append(number)
        release.set()
        return True

    seen = list(in_turn(["ab", "b", "c"], list, tmp_path, waits))  # "ab" needs both a and b
    other.join()
    assert seen == ["c", "ab", "b"]
    assert told == [2]


def test_claims_are_held_as_long_as_the_task_takes(tmp_path):
    held = [
        not _is_free(tmp_path / f"{task}.lock") for task in in_turn(["a", "b"], list, tmp_path, lambda number: True)
    ]
    assert held == [True, True]
    assert _is_free(tmp_path / "a.lock")
    assert _is_free(tmp_path / "b.lock")


def test_what_another_holds_can_be_left_out(tmp_path):
    with locked(tmp_path / "b.lock", wait=False):
        assert list(in_turn(["a", "b", "c"], list, tmp_path, lambda number: number != 1)) == ["a", "c"]


def _is_free(path: Path) -> bool:
    try:
        with locked(path, wait=False):
            return True
    except sharing.Taken:
        return False


@pytest.mark.slow
def test_two_processes_make_every_training_once(tmp_path):
    settings = yaml.safe_load((FOLDER / "compare" / "smoke.yaml").read_text())
    settings["systems"] = {"standard": settings["systems"]["standard"]}
    settings |= {"rows": ["iso_step"], "learning_rates": [1e-3, 1e-2], "evaluations": 2, "seeds": [1, 2, 3]}
    settings["overrides"]["trainer"]["num_train_steps"] = 8
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings))

    def start(output: str, runs: str = "shared") -> subprocess.Popen:
        words = ["-m", "experiments.compare", "--config", str(file), "--run_dir", str(tmp_path / runs)]
        words += ["--output", str(tmp_path / output)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    processes = [start("a"), start("b")]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert start("alone", "alone").wait() == 0
    first, second, alone = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("a", "b", "alone"))
    assert first["results"] == second["results"]
    for one, other in zip(first["results"], alone["results"], strict=True):
        assert one | {"seconds_per_step": 0} == other | {"seconds_per_step": 0}
    lines = {
        name: {
            path.parent.name: len(path.read_text().splitlines()) for path in (tmp_path / name).glob("*/metrics.jsonl")
        }
        for name in ("shared", "alone")
    }
    assert lines["shared"] == lines["alone"]  # twice as many if a training was made twice
    assert len(lines["shared"]) == len(first["results"]) + len(first["selection"])
