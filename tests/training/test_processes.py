"""One run on one device, on eight, and by two processes of four each: the same losses, and each other's checkpoints."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.tracking import read_metrics

pytestmark = pytest.mark.program

STEPS = 20
SAVED = 10  # the step of the first checkpoint that stays
GENERATED = {"type": "generated", "time_embed_dim": 16, "sinusoidal_dim": 8}
EULER = {"solver": "euler", "steps": 4}
MODELS = {
    "gpt2": {"block": {"type": "gpt2", "num_heads": 4}, "weights": GENERATED, "depth": EULER},
    "reversible": {
        "block": {"type": "gpt2", "num_heads": 4},
        "weights": GENERATED,
        "depth": EULER | {"adjoint": "reversible"},
    },
    "llama": {"block": {"type": "llama", "num_heads": 4, "num_kv_heads": 2}, "weights": GENERATED, "depth": EULER},
    "ssm": {
        "block": {"type": "ssm", "num_heads": 4, "form": "sequential", "state_size": 8},
        "weights": {"type": "modulated", "hidden_dim": 16, "sinusoidal_dim": 8},
        "depth": EULER,
    },
    "hybrid": {
        "prelude_layers": 1,
        "coda_layers": 1,
        "block": {"type": "gpt2", "num_heads": 4},
        "weights": {"type": "constant"},
        "depth": EULER | {"endpoint": "left"},
        "control": {"dim": 4},
    },
}
TENSOR = "{axes: {data: -1, model: 2}}"
LAYOUTS = {  # name: processes, devices of each, options
    "one": (1, 1, ()),
    "fsdp": (1, 8, ()),
    "tensor": (1, 8, ("--trainer.mesh", TENSOR)),
    "processes": (2, 4, ()),
}
PAIR = (2, 1, ())  # the smallest run of several processes


def start(folder: Path, model: str, layout: str, *words: str) -> list[subprocess.Popen]:
    """Starts a run `folder/model`, or continues it; one process or two. words: more of the command line."""
    config = {
        "run_dir": str(folder),
        "data": {"tokenizer": "byte", "cache_dir": str(folder.parent / "cache")},
        "model": {"type": "neuralode", "max_seq_len": 64, "hidden_dim": 64} | MODELS[model],
        "trainer": {
            "id": model,
            "seed": 1,
            "train_batch_size": 8,
            "num_train_steps": STEPS,
            "steps_per_eval": STEPS,
            "max_eval_batches": 1,
            "checkpointer": {"save_interval": "1h", "keep": [{"every": SAVED}]},
        },
        "optimizer": {"learning_rate": 3e-3, "warmup": 0.1},
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{model}.yaml").write_text(yaml.safe_dump(config))
    processes, devices, options = (LAYOUTS | {"pair": PAIR})[layout]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    command = [
        sys.executable,
        "-m",
        "qkvflow.train_lm",
        "--config_path",
        str(folder / f"{model}.yaml"),
        *options,
        *words,
    ]
    if processes > 1:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{sock.getsockname()[1]}"
        command += ["--trainer.distributed.coordinator_address", address, "--trainer.distributed.num_processes", "2"]
    each = [
        [*command, "--trainer.distributed.process_id", str(i)] if processes > 1 else command for i in range(processes)
    ]
    env = {**os.environ, "XLA_FLAGS": flags}
    return [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in each]


def run(folder: Path, model: str, layout: str, *, says: str = "new run") -> np.ndarray:
    """The training losses of all steps, and the last validation loss."""
    for process in (started := start(folder, model, layout)):
        output, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors[-3000:]
        assert process is not started[0] or says in errors
        # From C++, on CPUs only, by several threads that may cut each other short.
        said = [line for line in output.splitlines() if "[Gloo]" not in line and "peer ranks" not in line]
        assert process is started[0] or (said, errors) == ([], ""), "only the first process speaks"
    records = read_metrics(folder / model / "metrics.jsonl")
    return np.asarray([r["train/loss"] for r in records] + [records[-1]["eval/loss"]])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_gives_the_same_losses(base, model):
    """Sums in another order move a loss by some 1e-6 in one step, and twenty steps of Adam multiply that."""
    losses = {layout: run(base / layout, model, layout) for layout in LAYOUTS}
    assert all(x.shape == (STEPS + 1,) for x in losses.values())
    assert losses["one"][-1] < losses["one"][0] - 0.5, "it learns, so that wrong gradients would show"
    for layout, found in losses.items():
        np.testing.assert_allclose(found, losses["one"], atol=1e-4, err_msg=layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("processes", "one"), ("processes", "fsdp"), ("one", "processes"), ("tensor", "processes")]
)
def test_a_checkpoint_is_read_by_every_layout(base, before, after):
    """A run that one layout began and another continues ends as one that was never interrupted."""
    if not (base / before / "gpt2").is_dir():
        run(base / before, "gpt2", before)
    whole = read_metrics(base / before / "gpt2" / "metrics.jsonl")
    folder = base / f"{before}-{after}"
    shutil.copytree(base / before, folder)
    for checkpoint in (folder / "gpt2" / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{SAVED}":
            shutil.rmtree(checkpoint)
    config = folder / "gpt2" / "config.yaml"
    config.write_text(config.read_text().replace(f"run_dir: {base / before}", f"run_dir: {folder}"))
    continued = run(folder, "gpt2", after, says=f"continues after step {SAVED}")
    np.testing.assert_allclose(continued[:-1], [r["train/loss"] for r in whole], atol=1e-4)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_all_after_the_same_step(base):
    """The second one is told; the first one writes the checkpoint, too."""
    folder = base / "terminated"
    processes = start(folder, "gpt2", "processes", "--trainer.num_train_steps", "100000")
    metrics = folder / "gpt2" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 4) and time.monotonic() < deadline:
        time.sleep(0.5)
    processes[1].send_signal(signal.SIGTERM)
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [143, 143], errors
    last = read_metrics(metrics)[-1]["step"]
    assert (folder / "gpt2" / "checkpoints" / f"step-{last}" / "metadata.json").is_file()
    assert "Traceback" not in "".join(errors)


@pytest.fixture(scope="module")
def whole(base) -> np.ndarray:
    return run(base / "whole", "gpt2", "pair")


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_before_the_first_step_stops_all_and_costs_nothing(base, whole, told):
    """Whichever process gets it, whatever they are at, in a new run and in one that is continued."""
    folder = base / f"told-{told}"
    interruptions = [  # what the first process says when the signal comes, the step that is saved by then
        ("Building the model", -1),
        ("Compiling the training step", 0),
        ("Compiling the training step", 1),
        ("Loading checkpoint", 1),
        ("Preparing data", 1),
    ]
    for at, saved in interruptions:
        processes = start(folder, "gpt2", "pair")
        said = []
        for line in iter(processes[0].stderr.readline, ""):
            said.append(line)
            if at in line:
                break
        assert at in said[-1], "".join(said)
        processes[told].send_signal(signal.SIGTERM)
        assert [p.wait(timeout=120) for p in processes] == [143, 143], at
        assert "Traceback" not in "".join(p.stderr.read() for p in processes)
        assert checkpoint_steps(folder / "gpt2" / "checkpoints") == [saved][saved < 0 :], at
    finished = run(folder, "gpt2", "pair", says="continues after step 1")
    np.testing.assert_array_equal(finished, whole)


def test_sigterm_ends_a_process_that_waits_for_the_others(base):
    first, second = start(base / "alone", "gpt2", "pair")
    second.kill()
    address = first.args[first.args.index("--trainer.distributed.coordinator_address") + 1]
    host, port = address.split(":")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # the first process listens once it waits
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            break
        time.sleep(0.2)
    first.terminate()
    assert first.wait(timeout=20) == -signal.SIGTERM


@pytest.mark.slow
def test_a_mistake_ends_all_processes(base):
    """The first process says what is wrong; the second one does not wait for it."""
    folder = base / "mistake"
    (folder / "gpt2").mkdir(parents=True)
    (folder / "gpt2" / "somebody.txt").write_text("not a run")
    first, second = start(folder, "gpt2", "processes")
    errors = [p.communicate(timeout=120)[1] for p in (first, second)]
    assert (first.returncode, second.returncode) == (2, 2)
    assert "somebody.txt" in errors[0]
    assert "Traceback" not in "".join(errors)


def test_no_device_is_asked_before_the_processes_know_each_other():
    """`jax.distributed` must come before the first computation; checks of a configuration come before it."""
    script = """
import qkvflow
from jax._src import xla_bridge
from qkvflow.cli import parse
from qkvflow.runs import TrainConfig
from qkvflow.training.checks import check_config
check_config(parse(TrainConfig, ["--config_path", "configs/quickstart.yaml"])[0])
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
