"""The training program on records with control: it trains, evaluates, continues, and refuses what cannot be heard."""

import json
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest

from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig, load_run
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main

HYBRID = {
    "type": "neuralode",
    "max_seq_len": 16,
    "hidden_dim": 16,
    "block": {"type": "gpt2", "num_heads": 2, "mlp_scale": 2},
    "weights": {"type": "constant"},
    "depth": {"steps": 2, "endpoint": "left"},
    "control": {"dim": 2},
}


def raw(base: Path, *, name="a", steps=6, model=HYBRID, **data) -> dict:
    records = [{"text": f"record number {n}", "control": [n % 2, 0.5]} for n in range(100)]
    (base / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "model": model,
        "data": {"cache_dir": str(base / "cache"), "train": str(base / "a.jsonl"), **data},
        "optimizer": {"learning_rate": 1e-2, "lr_schedule": "constant", "warmup": 0, "weight_decay": 0.0},
        "run_dir": str(base / "runs"),
        "trainer": {
            "id": name,
            "train_batch_size": 4,
            "num_train_steps": steps,
            "steps_per_eval": 3,
            "max_eval_batches": 2,
            "per_device_parallelism": 2,  # two microbatches
            "checkpointer": {"keep": None, "save_interval": None},
        },
    }


def run(*args, accept_changes=False, **kwargs) -> Path:
    return main(decode(TrainConfig, {**raw(*args, **kwargs), "accept_changes": accept_changes}))


def losses(path: Path, key="train/loss") -> dict[int, float]:
    return {record["step"]: record[key] for record in read_metrics(path / "metrics.jsonl") if key in record}


@pytest.mark.program
@pytest.mark.slow
def test_a_run_with_control_trains_evaluates_and_continues(tmp_path):
    whole = run(tmp_path, name="whole", control_key="control")
    assert sorted(losses(whole)) == list(range(6))
    assert sorted(losses(whole, "eval/loss")) == [2, 5]
    first = control_weights(run(tmp_path, name="parts", steps=3, control_key="control"))
    parts = run(tmp_path, name="parts", control_key="control", accept_changes=True)
    assert losses(parts) == losses(whole)
    assert losses(parts, "eval/loss")[5] == losses(whole, "eval/loss")[5]
    heard, deaf = evaluate(parts)
    assert abs(heard - deaf) > 1e-4
    # Nothing but the gradient moves them (no weight decay), and it is zero for a model that hears no control.
    assert np.abs(control_weights(parts) - first).min() > 0


def evaluate(path: Path) -> tuple[float, float]:
    """Loss as eval_lm reads it, of the model, and of the model that hears no control."""
    run = load_run(path)
    deaf = eqx.tree_at(lambda m: m.transformer.flow.weights.control.weight, run.model, replace_fn=lambda w: w * 0)
    evaluator = RunEvaluator(run)
    return evaluator.loss(run.model), evaluator.loss(deaf)


def control_weights(path: Path) -> np.ndarray:
    config, model, _ = load_run(path)
    assert config.data.control_key == "control"
    return np.asarray(model.transformer.flow.weights.control.weight.array)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {**HYBRID, "control": None}}, r"control_key.*the model has no control"),
        ({"model": {"type": "gpt2", "num_heads": 2, "hidden_dim": 16, "num_layers": 1}}, "the model has no control"),
        ({"control_key": "kontrol"}, r"no record .* has a control under the key 'kontrol'"),
        ({"model": {**HYBRID, "control": {"dim": 3}}}, r"a\.jsonl:1: the key 'control' holds a list of 2; .* 3 finite"),
    ],
)
def test_what_cannot_be_heard_is_refused_and_leaves_nothing(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        run(tmp_path, **({"control_key": "control"} | change))
    assert not (tmp_path / "runs" / "a").exists()
