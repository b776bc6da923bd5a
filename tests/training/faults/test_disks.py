"""Disks: full while a checkpoint is saved, and a token cache that can only be read. On real file systems."""

import contextlib
import shutil
import threading

import pytest
from support.training import assert_same, losses, mounted, wait_until

from qkvflow.errors import UserError
from qkvflow.runs.checkpoints import checkpoint_steps, newest_good

pytestmark = [pytest.mark.slow, pytest.mark.program]
STEPS = 12


@pytest.fixture(scope="module")
def whole(training):
    return training.run("disk-whole", STEPS)


def _fill(folder, spare):
    """Fills the disk of `folder`, but for about `spare` bytes."""
    with open(folder / "filler", "ab") as file, contextlib.suppress(OSError):
        while shutil.disk_usage(folder).free > spare:
            file.write(bytes(4096))
            file.flush()


@pytest.mark.parametrize("spare", [0, 30_000])
def test_a_disk_that_fills_up_costs_only_the_steps_since_the_last_checkpoint(training, whole, tmp_path, spare):
    """`spare`: nothing can be written any more, or a part of a checkpoint."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as disk:
        run = disk / "full"
        metrics = run / "metrics.jsonl"

        def fill():
            wait_until(lambda: bool(checkpoint_steps(run / "checkpoints")))
            _fill(disk, spare)

        thread = threading.Thread(target=fill)
        thread.start()
        with pytest.raises(UserError, match=r"is full\. Free some space and run the same command again"):
            training.run("full", STEPS, run_dir=str(disk))
        thread.join()
        good, damaged = newest_good(run / "checkpoints")
        assert good is not None
        assert damaged == []
        with pytest.raises(UserError, match=r"full|has .* free"):  # still no room
            training.run("full", STEPS, run_dir=str(disk))
        assert newest_good(run / "checkpoints")[0] == good
        (disk / "filler").unlink()
        training.run("full", STEPS, run_dir=str(disk))
        assert metrics.is_file()
        assert_same(run, whole)


def test_a_finished_cache_on_a_read_only_disk_is_used_and_an_unfinished_one_is_refused(training, whole, tmp_path):
    cache = shutil.copytree(training.base / "cache", tmp_path / "cache")
    view = tmp_path / "view"
    with mounted(view, "--bind", str(cache), read_only=True):
        with pytest.raises(OSError, match="Read-only"):
            (view / "x").touch()
        run = training.run("read-only", STEPS, data={"cache_dir": str(view)})
    assert_same(run, whole)
    for finished in cache.glob("*/train"):
        finished.rename(finished.with_name("train.building"))
    with (
        mounted(view, "--bind", str(cache), read_only=True),
        pytest.raises(UserError, match=r"cannot be written: Read-only.*data\.cache_dir"),
    ):
        training.run("read-only-2", STEPS, data={"cache_dir": str(view)})
    assert not training.path("read-only-2").exists()
    assert len(losses(run)) == STEPS
