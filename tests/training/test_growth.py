"""A depth that grows during training: stages, resuming in each of them, what is logged; and penalties on the flow."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from levanter.tracker import TrackerConfig
from levanter.tracker.tracker import NoopTracker

from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig, load_run
from qkvflow.runs.growth import check_depth_goes_on
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main

STEPS = 8
GROW = {"grow": {"0.0": 1, "0.375": 2, "0.75": 4}}  # stages begin with the steps 0, 3 and 6


class StopAfter(NoopTracker):
    """Sends this process SIGTERM in the step after which it is to stop."""

    def __init__(self, step: int):
        self.step = step

    def log(self, metrics, *, step, commit=None):
        if step == self.step and "train/loss" in metrics:
            os.kill(os.getpid(), signal.SIGTERM)


@TrackerConfig.register_subclass("test_stop_after")
@dataclass
class StopAfterConfig(TrackerConfig):
    step: int = 0

    def init(self, run_id):
        return StopAfter(self.step)


def raw(base: Path, name: str, steps=GROW, weights=None, **changes) -> dict:
    trainer = {"id": name, "train_batch_size": 4, "num_train_steps": STEPS, "steps_per_eval": 4, "max_eval_batches": 1}
    data = {"cache_dir": str(base / "cache"), **changes.pop("data", {})}
    trainer |= {"checkpointer": {"keep": [{"every": 1000}], "save_interval": None}, **changes.pop("trainer", {})}
    model = {
        "type": "neuralode",
        "hidden_dim": 16,
        "max_seq_len": 32,
        "block": {"type": "gpt2", "num_heads": 2},
        "weights": weights or {"type": "basis", "dim": 2},
        "depth": {"steps": steps, **changes},
    }
    optimizer = {"learning_rate": 3e-3, "warmup": 2}
    return {"model": model, "data": data, "trainer": trainer, "optimizer": optimizer, "run_dir": str(base)}


def train(*args, **kwargs) -> Path:
    return main(decode(TrainConfig, raw(*args, **kwargs)))


def parameters(run: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_run(run).model) if hasattr(leaf, "dtype")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("growth")


@pytest.fixture(scope="module")
def undisturbed(base):
    return train(base, "undisturbed")


def test_what_is_logged(undisturbed):
    records = read_metrics(undisturbed / "metrics.jsonl")
    assert [r["train/depth_steps"] for r in records] == [1, 1, 1, 2, 2, 2, 4, 4]
    jumps = {r["step"]: r for r in records if "depth/loss_jump" in r}
    assert list(jumps) == [2, 5]
    for record in jumps.values():
        before, after = record["depth/loss_before"], record["depth/loss_after"]
        assert record["depth/loss_jump"] == pytest.approx(after - before)
        assert before != after
    assert records[3]["eval/loss"] > 0
    # The last validation is that of the last stage, as everything reads the model afterwards.
    assert load_run(undisturbed).model.config.depth.reading_steps == 4
    # Twice the evaluations of the block, twice their FLOPs.
    flops = [records[i]["throughput/total_gflops"] for i in (2, 3)] if "throughput/total_gflops" in records[2] else None
    assert flops is None or flops[1] > flops[0]


def test_a_stage_trains_as_a_model_of_its_depth(base, undisturbed):
    """The first stage is the training of a flow of one step, bit for bit."""
    alone = read_metrics(train(base, "alone", steps=1, trainer={"num_train_steps": 3}) / "metrics.jsonl")
    both = read_metrics(undisturbed / "metrics.jsonl")
    rates = [r["optim/learning_rate"] for r in both] if "optim/learning_rate" in both[0] else None
    assert alone[0]["train/loss"] == both[0]["train/loss"]
    assert rates is None or rates[0] >= 0


@pytest.mark.parametrize(
    "last", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 6]
)
def test_stopped_in_any_stage_and_at_a_change(base, undisturbed, last):
    """Stopped after step `last` and continued: the same parameters, bit for bit."""
    name = f"stopped{last}"
    stop = {"tracker": {"type": "test_stop_after", "step": last}}
    with pytest.raises(SystemExit) as leaving:
        train(base, name, trainer=stop)
    assert leaving.value.code == 128 + signal.SIGTERM
    assert [r["step"] for r in read_metrics(base / name / "metrics.jsonl")] == list(range(last + 1))
    assert load_run(base / name).model.config.depth.reading_steps == (1, 1, 1, 2, 2, 2, 4, 4)[last]
    continued = train(base, name)
    records, jumps = read_metrics(continued / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl")
    assert [r.get("depth/loss_jump") for r in records] == [r.get("depth/loss_jump") for r in jumps]
    for a, b in zip(parameters(undisturbed), parameters(continued), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"time_sampling": "jitter"}, {"solver": "heun", "adjoint": "reversible"}])
def test_with_jitter_and_other_schemes(base, changes):
    records = read_metrics(train(base, "-".join(map(str, changes.values())), **changes) / "metrics.jsonl")
    assert [r["train/depth_steps"] for r in records] == [1, 1, 1, 2, 2, 2, 4, 4]
    assert records[-1]["train/loss"] < records[0]["train/loss"]


def test_without_a_validation_text_the_jump_is_that_of_the_training_loss(base):
    text = base / "text.txt"
    text.write_text("so many words, one after another\n" * 200)
    run = train(base, "no-validation", data={"train": str(text), "validation_fraction": 0.0})
    records = read_metrics(run / "metrics.jsonl")
    jumps = {r["step"]: r["depth/loss_jump"] for r in records if "depth/loss_jump" in r}
    losses = [r["train/loss"] for r in records]
    assert jumps == {step: pytest.approx(losses[step] - losses[step - 1]) for step in (3, 6)}
    # Stopped at a change and continued, the first step of the stage knows the loss that another process logged.
    data = {"train": str(text), "validation_fraction": 0.0}
    with pytest.raises(SystemExit):
        train(base, "stopped-there", data=data, trainer={"tracker": {"type": "test_stop_after", "step": 2}})
    resumed = read_metrics(train(base, "stopped-there", data=data) / "metrics.jsonl")
    assert [r.get("depth/loss_jump") for r in resumed] == [r.get("depth/loss_jump") for r in records]


def test_what_is_drawn_does_not_depend_on_accumulation(base):
    """A batch in parts draws the number of steps, and jitter, of the whole batch: the same losses but for rounding."""
    drawn = {"steps": {"min": 1, "max": 4}, "time_sampling": "jitter"}
    whole = read_metrics(train(base, "whole", **drawn) / "metrics.jsonl")
    parts = read_metrics(train(base, "parts", **drawn, trainer={"per_device_parallelism": 1}) / "metrics.jsonl")
    steps = [r["train/depth_steps"] for r in whole]
    assert set(steps) == {1, 2, 4}, "jitter's additional step is not counted, as it is not for depth that grows"
    assert [r["train/depth_steps"] for r in parts] == steps
    for a, b in zip(whole, parts, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)


def test_a_longer_training_does_not_fall_back(base):
    train(base, "longer")
    more = {"num_train_steps": 2 * STEPS}
    with pytest.raises(UserError, match=rf"num_train_steps {2 * STEPS} --model\.depth\.steps '") as finished:
        main(decode(TrainConfig, raw(base, "longer")))
    with pytest.raises(
        UserError, match=r"grown to 4 steps .* step 8 into the stage with 2\. .*grow: \{0\.0: 1, "
    ) as told:
        main(decode(TrainConfig, raw(base, "longer", trainer=more) | {"accept_changes": True}))
    fractions = str(told.value).rpartition("--model.depth.steps '")[2].rstrip("'")
    assert f"'{fractions}'" in str(finished.value)
    main(
        decode(
            TrainConfig, raw(base, "longer", steps=yaml.safe_load(fractions), trainer=more) | {"accept_changes": True}
        )
    )
    steps = [r["train/depth_steps"] for r in read_metrics(base / "longer" / "metrics.jsonl")]
    assert steps == [1, 1, 1, 2, 2, 2, *[4] * 10]


def test_depth_goes_on(base):
    stored = decode(TrainConfig, raw(base, "any"))  # 1, 2 and 4 steps, from the training steps 0, 3 and 6 on

    def longer(grow: dict, last_step: int) -> None:
        given = raw(base, "any", steps={"grow": grow}, trainer={"num_train_steps": 2 * STEPS})
        check_depth_goes_on(stored, decode(TrainConfig, given), last_step)

    old = stored.model.depth.steps.grow
    longer(old, 2)  # in the first stage before and after
    longer({0.0: 1, 0.1875: 2, 0.375: 4}, 7)
    longer(old, -1)
    for last_step in (3, 7):
        with pytest.raises(UserError, match=r"has grown to .* To go on at the depth that it has"):
            longer(old, last_step)


def test_a_stage_without_a_step_is_refused(base):
    with pytest.raises(UserError, match="stage 3 of 3 has no training step"):
        train(base, "short", trainer={"num_train_steps": 2})
    with pytest.raises(UserError, match="steps that grow"):
        train(base, "layers", weights={"type": "per_layer"})
    assert not (base / "short").exists()


def test_penalties_are_logged_and_descended(base):
    """The loss is the sum; a heavy weight makes the flow stand still and its weights constant."""
    weights = {"type": "basis", "dim": 3, "smoothness_weight": 1.0}
    run = train(base, "penalties", steps=2, weights=weights, kinetic_weight=0.5)
    records = read_metrics(run / "metrics.jsonl")
    for r in records:
        total = r["train/next_token_loss"] + 0.5 * r["train/kinetic_energy"] + r["train/weight_roughness"]
        assert r["train/loss"] == pytest.approx(total, rel=1e-5)
    assert records[-1]["train/weight_roughness"] < 0.9 * records[0]["train/weight_roughness"]
    # Validation knows nothing of penalties.
    assert records[-1]["eval/loss"] < records[-1]["train/loss"]
