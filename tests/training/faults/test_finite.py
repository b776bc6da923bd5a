"""Steps that are not finite: training stops with the place and a good checkpoint, or skips them without a trace."""

import asyncio
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from haliax.jax_utils import is_jax_array_like
from levanter.schedule import BatchSchedule
from levanter.tensorstore_serialization import _create_ocdbt_spec, _list_ocdbt_keys
from levanter.trainer import Trainer
from support.training import losses, parameters

from qkvflow.errors import UserError
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics
from qkvflow.training.finite import BadSteps, TooManyBadSteps, data_position
from qkvflow.training.loop import _skipped_before

EVERY = {"keep": [{"every": 1}], "save_interval": None}
slow = [pytest.mark.slow, pytest.mark.program]


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(loss=steps, gradient=steps)`: the loss, or one number of each gradient, is NaN in these steps."""

    def install(loss=(), gradient=(), value=jnp.nan):
        step, gradients = Trainer._train_step, Trainer._compute_gradients_microbatched

        def spoiled_step(self, state, *args, **kwargs):
            self.now = state.step
            return step(self, state, *args, **kwargs)

        def spoiled_gradients(self, *args, **kwargs):
            result, grads, metrics = gradients(self, *args, **kwargs)
            result = jnp.where(jnp.isin(self.now, jnp.array(loss, int)), value, result)
            is_bad = jnp.isin(self.now, jnp.array(gradient, int))

            def change(x):
                return jnp.where(is_bad, x.at[(0,) * x.ndim].set(value), x) if is_jax_array_like(x) else x

            return result, jax.tree.map(change, grads), metrics

        monkeypatch.setattr(Trainer, "_train_step", spoiled_step)
        monkeypatch.setattr(Trainer, "_compute_gradients_microbatched", spoiled_gradients)

    return install


def _arrays(run, step):
    """All arrays of a checkpoint, by name."""
    folder = str(run / "checkpoints" / f"step-{step}")
    names = {
        key.removesuffix("/zarr.json") for key in asyncio.run(_list_ocdbt_keys(folder)) if key.endswith("zarr.json")
    }
    return {name: np.asarray(ts.open(_create_ocdbt_spec(folder, name)).result().read().result()) for name in names}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) for kind in ("loss", "gradient")])
def test_training_stops_at_the_step_with_its_data_and_a_good_checkpoint(training, spoil, kind):
    spoil(**{kind: [5]})
    name = f"stops-{kind}"
    words = r"not a number \(NaN\) at step 5 \(sequences 20 to 23 .*epoch 1 of \d+ .*is step-4.*max_skipped"
    with pytest.raises(UserError, match=words):
        training.run(name, checkpointer=EVERY)
    run = training.path(name)
    assert checkpoint_steps(run / "checkpoints") == [1, 2, 3, 4]
    assert all(np.isfinite(array).all() for array in parameters(run))
    assert all(math.isfinite(loss) for loss in losses(run).values())


@pytest.mark.slow
@pytest.mark.program
def test_an_infinite_loss_is_told(training, spoil):
    spoil(loss=[2], value=jnp.inf)
    with pytest.raises(UserError, match="infinite at step 2"):
        training.run("infinite")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) for kind in ("loss", "gradient")])
def test_a_skipped_step_changes_nothing_and_is_logged(training, spoil, capfd, kind):
    spoil(**{kind: [3, 5, 6]})
    run = training.run(f"skips-{kind}", max_skipped_steps=2, checkpointer=EVERY)
    before, after, later = (_arrays(run, step) for step in (2, 3, 4))
    assert {name for name in before if name.startswith("model/")}
    assert {name for name in before if name.startswith("opt_state/")}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"step", "training_key"}
    moved = {name for name in before if not np.array_equal(after[name], later[name])}
    assert {name.split("/")[0] for name in moved} == {"step", "training_key", "model", "opt_state"}
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["step"] for record in records if record.get("train/skipped_step")] == [3, 5, 6]
    assert [record["step"] for record in records if math.isnan(record["train/loss"])] == [3, 5, 6]
    assert "3 steps with non-finite values were skipped" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.program
def test_too_many_skipped_steps_in_a_row_stop_the_training(training, spoil):
    spoil(gradient=[1, 3, 4, 5, 6])
    for _ in range(2):  # resumed, the steps that were skipped before count
        with pytest.raises(UserError, match=r"at step 5, as in the 2 steps before.*last checkpoint is step-4"):
            training.run("in-a-row", max_skipped_steps=2, checkpointer=EVERY)
    assert all(np.isfinite(array).all() for array in _arrays(training.path("in-a-row"), 4).values())


@pytest.mark.slow
@pytest.mark.program
def test_the_policy_changes_no_number_of_a_good_training(training, undisturbed):
    assert losses(training.run("policy", max_skipped_steps=3)) == pytest.approx(losses(undisturbed), rel=1e-6)


def test_what_was_skipped_before_is_read_up_to_the_checkpoint(tmp_path):
    """Of several processes that share a run, only the first takes away what was logged after it."""
    run = SimpleNamespace(directory=SimpleNamespace(metrics=tmp_path / "metrics.jsonl"))
    assert _skipped_before(run, 4) == 0
    skipped = (0, 2, 3, 4)
    records = [{"step": k, "train/loss": 1.0} | ({"train/skipped_step": 1} if k in skipped else {}) for k in range(6)]
    run.directory.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert [_skipped_before(run, done) for done in range(7)] == [0, 1, 0, 1, 2, 3, 0]


def test_only_steps_in_a_row_count():
    steps = BadSteps(2)
    assert [steps.see(loss) for loss in (1.0, math.nan, math.inf, 1.0, math.nan, math.nan)] == [
        False, True, True, False, True, True,
    ]  # fmt: skip
    assert steps.total == 4
    with pytest.raises(TooManyBadSteps):
        steps.see(-math.inf)
    with pytest.raises(TooManyBadSteps):
        BadSteps(2, in_a_row=2).see(math.nan)
    assert not BadSteps(0).see(math.nan)  # Levanter's own check stands, or the user has switched it off


def test_the_position_in_the_data_follows_the_batch_schedule():
    assert data_position(BatchSchedule(4), 5, None) == "sequences 20 to 23 of the training order"
    assert data_position(BatchSchedule(4), 5, 10).endswith("epoch 3 of 10 sequences each")
    assert data_position(BatchSchedule(4), 4, 18).endswith("epoch 1 to 2 of 18 sequences each")
