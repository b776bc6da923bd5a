"""Clocks that jump, backwards and forwards: nothing depends on the time of day."""

import datetime
import json
import types
from datetime import timedelta

import jax.numpy as jnp
import pytest
from levanter import checkpoint as levanter_checkpoint
from levanter.checkpoint import CheckpointerConfig
from levanter.trainer import TrainerConfig
from support.training import assert_same

from qkvflow.runs import load_run
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.training.checkpointer import create_checkpointer


@pytest.fixture
def mad_clock(monkeypatch):
    """Every look at Levanter's clock finds another day: a year later, two years earlier, ..."""

    class Mad(datetime.datetime):
        looks = 0

        @classmethod
        def now(cls, tz=None):
            cls.looks += 1
            return datetime.datetime(2030, 1, 1) + timedelta(days=365 * (-1) ** cls.looks * cls.looks)

    fake = types.SimpleNamespace(**{name: getattr(datetime, name) for name in datetime.__all__} | {"datetime": Mad})
    monkeypatch.setattr(levanter_checkpoint, "datetime", fake)
    return Mad


def _saved(tmp_path, create, advance):
    checkpointer = create(CheckpointerConfig(base_path=str(tmp_path), save_interval=timedelta(seconds=30), keep=None))
    saved, save = [], checkpointer.save_checkpoint
    checkpointer.save_checkpoint = lambda **kwargs: (saved.append(kwargs["step"]), save(**kwargs))
    with TrainerConfig(require_accelerator=False).use_device_mesh():
        for step in range(13):
            advance()
            checkpointer.on_step(tree={"x": jnp.ones(3)}, step=step)
        checkpointer.wait_until_finished()
    return saved


def test_the_interval_between_saves_survives_a_jump(tmp_path, mad_clock):
    seconds = [0.0]

    def advance():
        seconds[0] += 10

    saved = _saved(tmp_path / "ours", lambda config: create_checkpointer(config, lambda: seconds[0]), advance)
    assert saved == [3, 6, 9, 12]  # every 30 seconds of the clock that only runs forwards
    assert _saved(tmp_path / "levanter", lambda config: config.create("."), advance) != saved
    assert checkpoint_steps(tmp_path / "ours") == [12]  # temporary ones go when the next is there, whatever their dates


def test_a_stop_at_a_step_whose_checkpoint_is_kept_keeps_it(tmp_path):
    def resumed(keep, stops, steps):
        folder = tmp_path / str(stops)
        with TrainerConfig(require_accelerator=False).use_device_mesh():
            for stop in (*stops, None):  # each is a process of its own
                config = CheckpointerConfig(base_path=str(folder), save_interval=None, keep=[{"every": keep}])
                checkpointer, start = create_checkpointer(config), 1 + max(checkpoint_steps(folder), default=0)
                for step in range(start, steps if stop is None else stop):
                    checkpointer.on_step(tree={"x": jnp.ones(3)}, step=step)
                if stop is not None:
                    checkpointer.save_to_continue({"x": jnp.ones(3)}, stop)
                checkpointer.wait_until_finished()
        return checkpoint_steps(folder)

    assert resumed(4, (), 14) == resumed(4, (4, 7, 12), 14) == [4, 8, 12]


@pytest.mark.slow
@pytest.mark.program
def test_the_newest_checkpoint_is_that_of_the_last_step_whatever_its_date(training, undisturbed, mad_clock):
    run = training.run("mad")
    dates = {
        step: json.loads((run / "checkpoints" / f"step-{step}" / "metadata.json").read_text())["timestamp"]
        for step in checkpoint_steps(run / "checkpoints")
    }
    (run / "checkpoints" / "step-7").rename(training.base / "mad-7")
    metadata = run / "checkpoints" / "step-6" / "metadata.json"
    metadata.write_text(metadata.read_text().replace(dates[6], "1970-01-01T00:00:00"))
    assert load_run(run).step == 6
    training.run("mad")
    assert_same(run, undisturbed)
