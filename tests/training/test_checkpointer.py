"""What stands before a checkpoint, and old ones that cannot be removed."""

import logging
import os
from pathlib import Path

import pytest
from levanter.checkpoint import CheckpointerConfig
from support.training import Training

from qkvflow import tracking
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics
from qkvflow.training import checkpointer


@pytest.mark.parametrize("error", [OSError("read-only"), RuntimeError("503 from the store")])
def test_a_failure_to_remove_one_is_logged(tmp_path, monkeypatch, caplog, error):
    """Also one that is no `OSError`, as those of stores are: Levanter's thread would end, with its work unfinished."""

    def fail(path):
        raise error

    monkeypatch.setattr(checkpointer, "remove_checkpoint", fail)
    made = checkpointer.create_checkpointer(CheckpointerConfig(base_path=str(tmp_path)))
    with caplog.at_level(logging.ERROR):
        made.remove(str(tmp_path / "step-1"))
    assert "step-1 could not be removed" in caplog.text


def test_metrics_are_on_the_disk_before_the_checkpoint_that_goes_on_from_them(tmp_path, monkeypatch):
    """A resumed run makes none of earlier steps, so a power cut must not take them."""
    synced, fsync = [], os.fsync

    def note(number: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{number}"))
        if file.name == "metrics.jsonl":
            synced.append(read_metrics(file)[-1]["step"])
        fsync(number)

    monkeypatch.setattr(tracking.os, "fsync", note)
    run = Training(tmp_path).run("a", steps=4)
    assert synced == checkpoint_steps(run / "checkpoints") == [2, 3]
