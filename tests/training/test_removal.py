"""Old checkpoints that cannot be removed: training goes on, and nobody waits for ever."""

import logging

import pytest
from levanter.checkpoint import CheckpointerConfig

from qkvflow.training import checkpointer


@pytest.mark.parametrize("error", [OSError("read-only"), RuntimeError("503 from the store")])
def test_a_failure_is_logged(tmp_path, monkeypatch, caplog, error):
    """Also one that is no `OSError`, as those of stores are: Levanter's thread would end, with its work unfinished."""

    def fail(path):
        raise error

    monkeypatch.setattr(checkpointer, "remove_checkpoint", fail)
    made = checkpointer.create_checkpointer(CheckpointerConfig(base_path=str(tmp_path)))
    with caplog.at_level(logging.ERROR):
        made.remove(str(tmp_path / "step-1"))
    assert "step-1 could not be removed" in caplog.text
