"""Laws of the training program, shown on Levanter's own GPT-2, with real processes where it matters."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
import yaml
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config

from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig, load_run
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main
from qkvflow.training.checks import model_shape, tree_bytes

STEPS, CHECKPOINT_EVERY = 120, 15
MODEL = {
    "type": "gpt2",
    "hidden_dim": 32,
    "num_heads": 2,
    "num_layers": 1,
    "max_seq_len": 64,
    "embed_pdrop": 0.1,
}


def _raw(base: Path, **trainer) -> dict:
    """A small training configuration; the text ships with Python."""
    return {
        "model": {**MODEL, "resid_pdrop": 0.1},
        "data": {"cache_dir": str(base / "cache")},
        "optimizer": {"learning_rate": 3e-3, "warmup": 5},
        "run_dir": str(base / "runs"),
        "trainer": {
            "id": "a",
            "train_batch_size": 4,
            "num_train_steps": 6,
            "steps_per_eval": 3,
            "max_eval_batches": 2,
            "checkpointer": {"keep": None, "save_interval": None},
            **trainer,
        },
    }


def _changed(raw: dict, key: str, value) -> dict:
    raw = json.loads(json.dumps(raw))
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return raw


def _losses(run: Path) -> dict[int, float]:
    records = read_metrics(run / "metrics.jsonl")
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["train/loss"] for record in records}


def _arrays(run: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_run(run).model) if eqx.is_array(leaf)]


# --- real processes ---------------------------------------------------------------------------------------


def _command(base: Path, name: str) -> list[str]:
    raw = _raw(base, num_train_steps=STEPS, steps_per_eval=50)
    raw["trainer"]["checkpointer"] = {"keep": [{"every": CHECKPOINT_EVERY}], "save_interval": None}
    raw["trainer"].pop("id")
    config = base / "configs" / f"{name}.yaml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(yaml.safe_dump(raw))
    return [sys.executable, "-m", "qkvflow.train_lm", "--config_path", str(config)]


def _start(base: Path, name: str) -> subprocess.Popen:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(_command(base, name), stdout=pipe, stderr=pipe, text=True, env=env, cwd=base)


def _wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if read_metrics(run / "metrics.jsonl")[-1:] and read_metrics(run / "metrics.jsonl")[-1]["step"] >= step:
                return
        time.sleep(0.002)
    pytest.fail(f"step {step} was not reached: {process.communicate()}")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("program")


@pytest.fixture(scope="module")
def finished(base) -> tuple[Path, str, str]:
    """An uninterrupted run: its directory, standard output and standard error."""
    process = _start(base, "whole")
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    return base / "runs" / "whole", stdout, stderr


@pytest.mark.program
def test_a_run_shows_progress_and_nothing_else(finished):
    _, stdout, stderr = finished
    expected = (
        r"Preparing data \.\.\.",
        r"Building the model \.\.\.",
        r".*/whole \(new run\): gpt2, [\d,]+ parameters, [\d,]+ tokens of text, 120 steps on .*",
        r"Compiling the training step \.\.\.",
        r"step \d+/120  loss \d\.\d{3}(  [\d,]+ tokens/s)?  (\?|\d\d:\d\d) left",
        r"step (50|100|120)  validation loss \d\.\d{3}  perplexity [\d.]+  \(unigram 3\.\d\d\)",
        r"(Preparing|Building|Compiling) .* \.\.\. \d+ s",
    )
    strangers = [line for line in stderr.splitlines() if not any(re.fullmatch(e, line) for e in expected)]
    assert strangers == []
    assert len(re.findall("validation loss", stderr)) == 3
    assert re.match(r"Finished: validation loss \d\.\d{3}  perplexity .*\(unigram 3\.\d\d\)\nThe run is in ", stdout)
    assert "tensorboard --logdir" in stdout


@pytest.mark.program
def test_a_run_directory_describes_itself(finished):
    run = finished[0]
    names = {"config.yaml", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "train.log"}
    assert names <= {path.name for path in run.iterdir()}
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert all({"train/loss", "throughput/tokens_per_second"} <= record.keys() for record in records)
    assert [record["step"] for record in records if "eval/loss" in record] == [49, 99, 119]
    assert checkpoint_steps(run / "checkpoints") == [
        *range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY),
        STEPS - 1,
    ]
    loaded = load_run(run)
    config, model, tokenizer = loaded
    assert (loaded.step, config.trainer.id, config.vocab_size) == (STEPS - 1, "whole", 257)
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    tokens = hax.named(np.arange(64), "position")
    assert model(tokens, AttentionMask.causal()).axes == (Axis("position", 64), Axis("vocab", 257))
    assert load_run(run, checkpoint_step=15).step == 15


@pytest.mark.program
def test_a_finished_run_is_not_run_again(base, finished):
    again = _start(base, "whole")
    stdout, stderr = again.communicate(timeout=60)
    assert (again.returncode, stdout) == (2, "")
    assert re.fullmatch(r"error: the run .*/whole is finished: .*\n", stderr)


@pytest.fixture(scope="module")
def stopped(base) -> tuple[Path, int, str]:
    """A run that was killed, continued and terminated: its directory, exit status and standard output."""
    run = base / "runs" / "broken"
    killed = _start(base, "broken")
    _wait_for_step(killed, run, 40)
    killed.kill()
    killed.communicate()
    terminated = _start(base, "broken")
    _wait_for_step(terminated, run, 70)
    terminated.send_signal(signal.SIGTERM)
    stdout, _ = terminated.communicate(timeout=60)
    return run, terminated.returncode, stdout


@pytest.mark.program
def test_a_terminated_run_finishes_its_step_and_writes_a_checkpoint(stopped):
    run, status, stdout = stopped
    assert status == 143
    match = re.match(r"Stopped by SIGTERM after step (\d+); a checkpoint was written", stdout)
    assert match
    assert checkpoint_steps(run / "checkpoints")[-1] == max(_losses(run)) == int(match[1])


@pytest.mark.program
def test_a_killed_and_a_terminated_run_continue_bit_for_bit(base, finished, stopped):
    run, last_step = stopped[0], max(_losses(stopped[0]))
    last = _start(base, "broken")
    _, stderr = last.communicate(timeout=120)
    assert last.returncode == 0
    assert f"Loading checkpoint step-{last_step}" in stderr
    assert _losses(run) == _losses(finished[0])
    for got, expected in zip(_arrays(run), _arrays(finished[0]), strict=True):
        np.testing.assert_array_equal(got, expected)


# --- in this process --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.program
def test_validation_changes_no_training_number(tmp_path):
    one = main(decode(TrainConfig, _raw(tmp_path, id="often", steps_per_eval=1)))
    two = main(decode(TrainConfig, _raw(tmp_path, id="seldom", steps_per_eval=100)))
    assert _losses(one) == _losses(two)
    assert len([record for record in read_metrics(one / "metrics.jsonl") if "eval/loss" in record]) == 6
    assert [record["step"] for record in read_metrics(two / "metrics.jsonl") if "eval/loss" in record] == [5]


@pytest.mark.slow
@pytest.mark.program
def test_a_run_can_be_trained_longer(tmp_path):
    raw = _raw(tmp_path)
    run = main(decode(TrainConfig, raw))
    with pytest.raises(UserError, match="finished"):
        main(decode(TrainConfig, raw))
    longer = {**_changed(raw, "trainer.num_train_steps", 8), "accept_changes": True}
    assert main(decode(TrainConfig, longer)) == run
    assert sorted(_losses(run)) == list(range(8))


@pytest.mark.program
def test_a_loss_that_is_not_finite_is_explained(tmp_path):
    raw = _changed(_raw(tmp_path), "optimizer", {"learning_rate": 1e30, "warmup": 0, "max_grad_norm": None})
    with pytest.raises(UserError, match=r"is not a number.*at step \d \(sequences .*no checkpoint yet.*learning_rate"):
        main(decode(TrainConfig, raw))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trainer.mesh", {"compute_mapping": {"vocab": "model"}}, "maps `vocab`.*silently wrong"),
        ("trainer.mesh", {"shared_mapping": {"vocab": "model"}}, "maps `vocab`.*silently wrong"),
        ("trainer.mesh", {"axes": {"data": 3}}, r"trainer\.mesh.*1 devices"),
        ("trainer.num_train_steps", 0, r"trainer\.num_train_steps.*at least 1"),
        ("trainer.train_batch_size", 0, r"trainer\.train_batch_size.*multiple of 1"),
        ("trainer.train_batch_size", 10**9, r"not enough memory: .* the states of 1,000,000,000 sequences .* TiB"),
        ("trainer.per_device_parallelism", 3, "divisible"),
        ("trainer.per_device_eval_parallelism", 0, r"per_device_eval_parallelism.*at least 1"),
        ("trainer.require_accelerator", True, "no GPU"),
        ("trainer.load_checkpoint", False, "overwrite"),
        ("trainer.load_checkpoint", True, "has no checkpoint yet"),
        ("data.stop_strategy", "restarts", "first_exhausted, all_exhausted, restart"),
        ("data.stop_strategy", "first_exhausted", r"num_train_steps` is 1000000, but .* sequences end after \d+ steps"),
        ("data.max_train_batches", {"nothing": 1}, "has nothing, which no component is called"),
        ("data.max_train_batches", {"builtin": 10**6}, "training set of `data` cannot be made: Max sequences"),
        ("trainer.checkpointer.base_path", "elsewhere", "run directory"),
        ("trainer.id", "../a", r"trainer\.id"),
        ("trainer.initialize_from", "/nowhere", "initialize_from"),
        ("train_seq_len", 65, r"train_seq_len.*max_seq_len.*64"),
        ("vocab_size", 10, "vocab_size.*257 tokens"),
        ("model", {"type": "neuralode", "hidden_dim": 30}, "`model`.*num_heads"),
        ("weight_decay_on", "nothing", "weight_decay_on"),
        ("data.train", "no.txt", r"no\.txt"),
    ],
)
def test_impossible_settings_are_refused_and_leave_nothing(tmp_path, key, value, words):
    more = {"num_train_steps": 10**6} if value == "first_exhausted" else {}
    with pytest.raises(UserError, match=words):
        main(decode(TrainConfig, _changed(_raw(tmp_path, **more), key, value)))
    assert not (tmp_path / "runs" / "a").exists()


def test_the_size_of_a_model_is_known_without_building_it():
    config = Gpt2Config(num_layers=1, hidden_dim=8, num_heads=1, max_seq_len=4)
    model = config.build(Axis("vocab", 5), key=jax.random.PRNGKey(0))
    assert tree_bytes(model_shape(config, Axis("vocab", 5))) == tree_bytes(model)
    assert tree_bytes(model) == sum(leaf.nbytes for leaf in jax.tree.leaves(model) if eqx.is_array(leaf))
