"""Seeds in parallel: n trainings as one program are n single trainings, in their runs and in their faults."""

import functools
import gc
import os
import shutil
import signal
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax.jax_utils import is_jax_array_like
from levanter.trainer import Trainer
from support.tiny import FLOW
from support.together import ADAM, SEEDS, STEPS, together, train
from support.training import PROCESSES, Training, assert_same, losses, parameters, wait_until

from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import decode, read_yaml
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics
from qkvflow.training.finite import Diverged
from qkvflow.training.start import FromScratch
from qkvflow.training.together import JointStep, LaneInfo, train_together

pytestmark = pytest.mark.usefixtures("numbers_of_lanes")
CLOSE = 1e-5  # products of n lanes at once may be rounded in another order
EVERY_FOUR = {"keep": [{"every": 4}], "save_interval": None}
GPT2 = {"type": "gpt2", "num_heads": 2}
DROPOUT = {**GPT2, "embed_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}
BASIS = {"type": "basis", "dim": 2}
CASES = {
    "generated": {"model": FLOW},
    "dropout": {"model": {**FLOW, "block": DROPOUT, "weights": BASIS}},
    "layers": {
        "model": {**FLOW, "weights": {"type": "per_layer"}, "depth": {"steps": 2, "step_size": "residual"}},
        "watch": {"watch_targets": ["grads"], "interval": 5, "include_histograms": True},
    },
    "drawn": {"model": {**FLOW, "weights": BASIS, "depth": {"steps": {"min": 1, "max": 4}, "time_sampling": "jitter"}}},
    "grows": {"model": {**FLOW, "weights": BASIS, "depth": {"steps": {"grow": {"0.0": 1, "0.5": 3}}}}},
    "adaptive": {
        "model": {**FLOW, "weights": BASIS, "depth": {"solver": "tsit5", "rtol": 1e-3, "atol": 1e-4, "max_steps": 32}}
    },
    "reversible": {
        "model": {**FLOW, "weights": BASIS, "depth": {"solver": "heun", "steps": 2, "adjoint": "reversible"}},
        "per_device_parallelism": 2,
    },
    "levanter": {"model_averaging": {"type": "ema", "beta": 0.9}},
}
HEAVY = ("generated", "layers", "drawn", "grows", "adaptive", "reversible", "levanter")


@pytest.fixture(scope="module")
def training(tmp_path_factory, numbers_of_lanes) -> Training:
    return Training(tmp_path_factory.mktemp("together"))


def alone(training: Training, name: str, seed: int, steps=STEPS, **changes) -> Path:
    return training.run(name, steps, seed=seed, optimizer=ADAM, **changes)


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def assert_close(run: Path, expected: Path) -> None:
    """The same training but for rounding: its parameters, its losses, what it writes."""
    for got, want in zip(parameters(run), parameters(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)
    got, want = read_metrics(run / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl")
    assert [sorted(record) for record in got] == [sorted(record) for record in want]
    for a, b in zip(got, want, strict=True):
        for key in a:
            if not key.startswith("throughput/") and "time" not in key:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=CLOSE, nan_ok=True), (key, a["step"])
    configs = [read_yaml(path / "config.yaml") for path in (run, expected)]
    for config in configs:
        del config["trainer"]["id"]
    assert configs[0] == configs[1]
    assert names(run) == names(expected)
    assert checkpoint_steps(run / "checkpoints") == checkpoint_steps(expected / "checkpoints")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in HEAVY)) for c in CASES])
def test_seeds_together_are_the_trainings_alone(training, case):
    changes = {"steps_per_eval": 10, "checkpointer": EVERY_FOUR, **CASES[case]}
    made = together(training, case, **changes)
    assert [one.exit_status for one in made] == [0, 0]
    assert all("Finished: validation loss" in one.text for one in made)
    for seed in SEEDS:
        assert_close(training.path(f"{case}-{seed}"), alone(training, f"{case}-alone-{seed}", seed, **changes))
    first, second = (training.path(f"{case}-{seed}") for seed in SEEDS)
    assert max(np.abs(a - b).max() for a, b in zip(parameters(first), parameters(second), strict=True)) > 100 * CLOSE
    if case == "drawn":
        drawn = [[r["train/depth_steps"] for r in read_metrics(run / "metrics.jsonl")] for run in (first, second)]
        assert drawn[0] != drawn[1]


@pytest.fixture(scope="module")
def whole(training) -> Training:
    """Two finished runs with checkpoints after the steps 4, 8 and 11, `whole-3` and `whole-8`; with dropout."""
    together(training, "whole", steps=12, checkpointer=EVERY_FOUR, **CASES["dropout"])
    return training


def interrupted(whole: Training, name: str, **newest: int) -> None:
    """Copies of the finished runs as they were when killed, with these newest checkpoints; `seed3=4`."""
    for seed in SEEDS:
        run = whole.path(f"{name}-{seed}")
        shutil.copytree(whole.path(f"whole-{seed}"), run)
        for step in checkpoint_steps(run / "checkpoints"):
            if step > newest[f"seed{seed}"]:
                shutil.rmtree(run / "checkpoints" / f"step-{step}")
        config = (run / "config.yaml").read_text().replace(f"whole-{seed}", run.name)
        (run / "config.yaml").write_text(config)


@pytest.mark.parametrize("newest", [{"seed3": 4, "seed8": 8}, {"seed3": 8, "seed8": 4}])
def test_resumed_from_different_steps(whole, newest):
    """Killed between the checkpoints of two seeds: in the end all is the same, bit for bit."""
    name = "-".join(map(str, ("killed", *newest.values())))
    interrupted(whole, name, **newest)
    together(whole, name, steps=12, checkpointer=EVERY_FOUR, **CASES["dropout"])
    for seed in SEEDS:
        assert_same(whole.path(f"{name}-{seed}"), whole.path(f"whole-{seed}"))


def test_no_step_is_made_beside_the_states_that_a_loop_has_read(training, monkeypatch):
    """Sliced for a validation or a checkpoint, they would double the memory of the next step."""
    alive: list[weakref.ref] = []
    step, take = JointStep.__call__, LaneInfo.state.func
    held: list[int] = []

    def count():
        held.append(sum(one() is not None for one in alive))

    def counted(self, batches):
        count()
        return step(self, batches)

    def kept(self):
        count()
        state = take(self)
        alive.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(state.model) if isinstance(leaf, jax.Array))
        return state

    state = functools.cached_property(kept)
    state.__set_name__(LaneInfo, "state")
    monkeypatch.setattr(LaneInfo, "state", state)
    monkeypatch.setattr(JointStep, "__call__", counted)
    gc.disable()
    try:
        together(training, "read", steps=6, steps_per_eval=2, checkpointer=EVERY_FOUR)
    finally:
        gc.enable()
    assert alive
    assert held == [0] * (6 + 2 * 4)  # six steps; each of two lanes reads four states, with one checkpoint between


def test_a_sliced_state_is_forgotten():
    states = []

    def take():
        states.append(object())
        return states[-1]

    info = LaneInfo(1, 0.5, 0.1, None, take)
    assert not info.forget()
    assert info.state is info.state is states[0]
    assert info.forget()
    assert not info.forget()
    assert info.state is states[1]


def test_one_of_them_resumed(whole):
    """With a lane left empty bit for bit, alone up to rounding."""
    for name, lanes in (("rest", 2), ("alone", None)):
        interrupted(whole, name, seed3=11, seed8=4)
        together(whole, name, (8,), 12, lanes, checkpointer=EVERY_FOUR, **CASES["dropout"])
    assert_same(whole.path("rest-8"), whole.path("whole-8"))
    interrupted(whole, "single", seed3=11, seed8=4)
    alone(whole, "single-8", 8, 12, checkpointer=EVERY_FOUR, **CASES["dropout"])
    for name in ("alone-8", "single-8"):
        assert_close(whole.path(name), whole.path("whole-8"))


def test_a_signal_stops_all_with_checkpoints(whole, monkeypatch):
    from qkvflow.tracking import JsonlTracker

    log = JsonlTracker.log

    def stop(self, metrics, *, step, commit=None):
        if step == 5 and "train/loss" in metrics and "stopped-8" in str(self._path):
            os.kill(os.getpid(), signal.SIGTERM)
        log(self, metrics, step=step, commit=commit)

    options = {"steps": 12, "checkpointer": EVERY_FOUR, **CASES["dropout"]}
    with monkeypatch.context() as patch:
        patch.setattr(JsonlTracker, "log", stop)
        made = together(whole, "stopped", **options)
    assert [one.exit_status for one in made] == [128 + signal.SIGTERM] * 2
    # The signal came after the first one had gone on.
    assert [checkpoint_steps(whole.path(f"stopped-{seed}") / "checkpoints")[-1] for seed in SEEDS] == [6, 5]
    together(whole, "stopped", **options)
    for seed in SEEDS:
        assert_same(whole.path(f"stopped-{seed}"), whole.path(f"whole-{seed}"))


def _key(seed: int, step: int) -> jax.Array:
    """The key of the training state before a step."""
    key = jax.random.split(jax.random.PRNGKey(seed), 4)[3]
    return functools.reduce(lambda key, _: jax.random.split(key)[1], range(step), key)


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(seed, steps)`: from now on, the gradient of these steps has a NaN, in trainings with this seed."""

    def install(seed, *steps):
        step, gradients = Trainer._train_step, Trainer._compute_gradients_microbatched
        keys = jnp.stack([_key(seed, number) for number in steps])

        def spoiled_step(self, state, *args, **kwargs):
            self.is_bad = jnp.any(jnp.all(state.training_key[None] == keys, axis=1))
            return step(self, state, *args, **kwargs)

        def spoiled_gradients(self, *args, **kwargs):
            result, grads, metrics = gradients(self, *args, **kwargs)

            def change(x):
                return jnp.where(self.is_bad, jnp.nan, x) if is_jax_array_like(x) else x

            return result, jax.tree.map(change, grads), metrics

        monkeypatch.setattr(Trainer, "_train_step", spoiled_step)
        monkeypatch.setattr(Trainer, "_compute_gradients_microbatched", spoiled_gradients)

    return install


def test_a_step_is_skipped_by_the_seed_that_it_spoils_alone(training, spoil):
    spoil(8, 2, 5)
    made = together(training, "skips", steps=8, max_skipped_steps=1)
    assert ["2 steps with non-finite values were skipped" in one.text for one in made] == [False, True]
    for seed, skipped in zip(SEEDS, ([], [2, 5]), strict=True):
        run = training.path(f"skips-{seed}")
        assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if r.get("train/skipped_step")] == skipped
        assert_close(run, alone(training, f"skips-alone-{seed}", seed, 8, max_skipped_steps=1))


def test_one_that_fails_is_named_and_the_others_keep_what_they_have(training, spoil):
    spoil(3, 5)
    with pytest.raises(Diverged, match=r"fails-3: the training loss, .*not a number \(NaN\) at step 5 .*step-4"):
        together(training, "fails", steps=8, checkpointer=EVERY_FOUR)
    assert checkpoint_steps(training.path("fails-3") / "checkpoints") == [4]
    # The other one made step 5 and was then asked to stop.
    assert checkpoint_steps(training.path("fails-8") / "checkpoints") == [4, 5]
    assert len(losses(alone(training, "fails-8", 8, 8, checkpointer=EVERY_FOUR))) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"learning_rate": 1e-3}}, r"differ by their seed .*\n.*optimizer.learning_rate"),
        ({"id": "refused-3"}, "a directory each"),
    ],
)
def test_what_differs_in_more_than_the_seed_is_refused(training, changes, words):
    raw = [training.raw("refused-3", seed=3), training.raw("refused-8", seed=8, **changes)]
    with quiet_libraries() as quiet, pytest.raises(UserError, match=words):
        train_together([(decode(TrainConfig, one), FromScratch.of) for one in raw], quiet)
    assert not training.path("refused-3").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tracker": {"type": "wandb"}}, "W&B"),
        ({"profiler": {"enabled": True}}, "trainer.profiler"),
        ({"jax_config": {"jax_default_prng_impl": "rbg"}}, "`rbg`.* Use threefry2x32"),
        ({}, "on one device, but there are 2: .* one seed at a time"),
    ],
)
def test_what_cannot_be_done_together_is_refused(training, changes, words, monkeypatch):
    if not changes:
        monkeypatch.setattr(jax, "device_count", lambda: 2)
    try:
        with pytest.raises(UserError, match=words):
            together(training, "impossible", **changes)
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    assert not training.path("impossible-3").exists()


@pytest.mark.slow
@pytest.mark.program
def test_kills_leave_no_trace(training):
    """A temporary checkpoint after nearly every step; killed in some of them."""

    def start(name, save_interval):
        process = PROCESSES.Process(target=train, args=(str(training.base), name, save_interval))
        process.start()
        return process

    whole = start("never", None)
    whole.join()
    assert whole.exitcode == 0
    metrics = training.path("often-8") / "metrics.jsonl"
    for step in (7, 19, 33):
        process = start("often", "0.01s")
        wait_until(lambda step=step: metrics.is_file() and max(losses(metrics.parent), default=0) >= step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    last = start("often", "0.01s")
    last.join()
    assert last.exitcode == 0
    for seed in SEEDS:
        assert_same(training.path(f"often-{seed}"), training.path(f"never-{seed}"))
