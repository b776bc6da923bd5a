"""Processes that are killed, stopped, or started twice on one run: in the end the run is what it would have been."""

import os
import random
import re
import signal
import time

import pytest
from support.training import assert_same, wait_until

from qkvflow.checksums import damage_of
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.program]
KILLS, STEPS = 20, 160
# A temporary checkpoint after every step, each removed when the next is there; a lasting one now and then.
OFTEN = {"keep": [{"every": 25}], "save_interval": "0.001s"}
SELDOM = {"keep": None, "save_interval": None}


@pytest.fixture(scope="module")
def whole(training):
    process = training.start("whole", STEPS, **_cached(training), checkpointer=SELDOM)
    process.join()
    assert process.exitcode == 0, training.output("whole").read_text()
    return training.path("whole")


def _cached(training):
    """Compiled once for all processes: that is most of what a small training costs."""
    return {"jax_compilation_cache_dir": str(training.base / "compiled")}


def _last_step(run):
    metrics = run / "metrics.jsonl"
    return max([record["step"] for record in read_metrics(metrics)] if metrics.is_file() else [], default=-1)


def _partial(run):
    """The checkpoints that are begun and not complete."""
    return [path for path in (run / "checkpoints").glob("step-*") if not (path / "metadata.json").exists()]


def test_twenty_random_kills_leave_no_trace(training, whole):
    run, choose = training.path("killed"), random.Random(0)
    in_save, start_up = 0, 0.0
    for _ in range(KILLS):
        before = _last_step(run)
        began = time.perf_counter()
        process = training.start("killed", STEPS, checkpointer=OFTEN, **_cached(training))
        if not start_up or choose.random() < 0.8:  # among the steps and saves; otherwise anywhere in the start
            wait_until(lambda before=before: _last_step(run) > before, process)
            start_up = time.perf_counter() - began
            time.sleep(choose.uniform(0, 0.3))
        else:
            time.sleep(choose.uniform(0, start_up))
        assert process.exitcode is None, training.output("killed").read_text()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, training.output("killed").read_text()
        in_save += bool(_partial(run))
    print(f"{KILLS} kills, {in_save} in a save, after step {_last_step(run)}")
    assert in_save > 0
    last = training.start("killed", STEPS, checkpointer=OFTEN, **_cached(training))
    last.join()
    assert last.exitcode == 0, training.output("killed").read_text()
    assert_same(run, whole)
    assert _partial(run) == []
    steps = checkpoint_steps(run / "checkpoints")
    assert steps[-1] == STEPS - 1
    assert all(damage_of(run / "checkpoints" / f"step-{step}") is None for step in steps)
    assert not (run / "damaged").exists()


def test_a_kill_in_the_middle_of_a_save_costs_that_checkpoint_only(training, whole):
    run = training.path("in-save")
    process = training.start("in-save", STEPS, checkpointer=OFTEN, **_cached(training))
    wait_until(lambda: len(checkpoint_steps(run / "checkpoints")) > 0, process)
    while not _partial(run):
        assert process.exitcode is None
    process.kill()
    process.join()
    kept = checkpoint_steps(run / "checkpoints")[-1]
    assert damage_of(run / "checkpoints" / f"step-{kept}") is None
    process = training.start("in-save", STEPS, checkpointer=OFTEN, **_cached(training))
    process.join()
    assert f"continues after step {kept}" in training.output("in-save").read_text()
    assert_same(run, whole)


def test_a_terminated_run_saves_where_it_stands_and_a_second_process_is_refused(training, whole):
    run = training.path("terminated")
    keep = {"checkpointer": SELDOM, **_cached(training)}
    first = training.start("terminated", STEPS, **keep)
    wait_until(lambda: (run / "config.yaml").is_file(), first)
    second = training.start("terminated", STEPS, **keep)
    second.join()
    assert second.exitcode == 2
    assert f"error: another process (number {first.pid}) is training" in training.output("terminated").read_text()
    wait_until(lambda: _last_step(run) >= 20, first)
    first.terminate()
    first.join()
    assert first.exitcode == 143
    stopped = re.search(r"Stopped by SIGTERM after step (\d+)", training.output("terminated").read_text())
    assert stopped
    assert checkpoint_steps(run / "checkpoints") == [int(stopped[1])] == [_last_step(run)]
    last = training.start("terminated", STEPS, **keep)
    last.join()
    assert last.exitcode == 0
    assert_same(run, whole)
