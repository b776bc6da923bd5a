"""`trainer.model_averaging`: the average of the parameters over steps is kept, validated, and read by programs."""

import contextlib
import io
import json

import numpy as np
import pytest
import yaml
from support.training import Training

from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.eval_lm import EvalConfig
from qkvflow.eval_lm import main as evaluate
from qkvflow.finetune_lm import main as finetune
from qkvflow.runs import load_run
from qkvflow.runs.config import FinetuneConfig
from qkvflow.tracking import read_metrics

BETA = 0.75
EMA = {"model_averaging": {"type": "ema", "beta": BETA}}
OPTIMIZER = {"learning_rate": 0.1, "lr_schedule": "constant", "warmup": 0}
WITHOUT = r"has no average to load: it was trained without trainer\.model_averaging"
EACH = {"checkpointer": {"keep": [{"every": 1}], "save_interval": None}}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return Training(tmp_path_factory.mktemp("averages"))


@pytest.fixture(scope="module")
def run(training):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = training.run("averaged", 3, optimizer=OPTIMIZER, **EMA, **EACH)
    training.output("averaged").write_text(said.getvalue())
    return run


def weight(run, step, averaged):
    model = load_run(run, step, averaged=averaged).model
    return np.asarray(model.transformer.blocks.stacked.mlp.c_fc.weight.array)


def test_the_average_is_that_of_the_steps(run):
    """A_n = beta A_(n-1) + (1 - beta) P_n. In fp32."""
    before, last, averaged = weight(run, 1, True), weight(run, 2, False), weight(run, 2, True)
    assert np.abs(last - before).max() > 0.05
    np.testing.assert_allclose(averaged, BETA * before + (1 - BETA) * last, rtol=0, atol=1e-6)


def test_programs_read_either(run):
    """With the losses of the training's last validation, which reads both."""
    logged = read_metrics(run / "metrics.jsonl")[-1]
    given = {"run": str(run), "max_eval_batches": 1}
    (last,), (average,) = evaluate(EvalConfig(**given)), evaluate(EvalConfig(**given, averaged=True))
    assert last.loss == pytest.approx(logged["eval/loss"], rel=1e-5)
    assert average.loss == pytest.approx(logged["eval/ema/loss"], rel=1e-5)
    assert abs(last.loss - average.loss) > 0.01
    for file, loss in (("depth.json", last.loss), ("depth-averaged.json", average.loss)):
        assert json.loads((run / "evaluation" / file).read_text())["readings"][0]["loss"] == pytest.approx(loss)


def test_the_end_of_a_training_says_both(training, run):
    logged, said = read_metrics(run / "metrics.jsonl")[-1], training.output("averaged").read_text()
    assert f"Finished: validation loss {logged['eval/loss']:.3f} " in said
    assert f"which --averaged reads: validation loss {logged['eval/ema/loss']:.3f})" in said


def test_a_run_without_one(run):
    file = run / "config.yaml"
    written = file.read_text()
    try:
        config = yaml.safe_load(written)
        config["trainer"]["model_averaging"] = None
        file.write_text(yaml.safe_dump(config))
        with pytest.raises(UserError, match=WITHOUT):
            load_run(run, averaged=True)
    finally:
        file.write_text(written)


@pytest.mark.slow
def test_so_does_a_fine_tune_by_lora(run, training):
    raw = training.raw("tuned", 3, **EMA, **EACH)
    del raw["model"]
    raw |= {"run": str(run), "mode": {"type": "lora", "r": 2, "alpha": 4.0}, "optimizer": OPTIMIZER}
    tuned = finetune(decode(FinetuneConfig, raw))
    logged = read_metrics(tuned / "metrics.jsonl")[-1]
    assert logged["eval/loss"] != logged["eval/ema/loss"]
    for averaged, name in ((False, "eval/loss"), (True, "eval/ema/loss")):
        (found,) = evaluate(EvalConfig(str(tuned), max_eval_batches=1, averaged=averaged))
        assert found.loss == pytest.approx(logged[name], rel=1e-5)
    merged = finetune(decode(FinetuneConfig, {"run": str(tuned), "merge": True, "run_dir": str(training.base)}))
    with pytest.raises(UserError, match=WITHOUT):
        load_run(merged, averaged=True)
