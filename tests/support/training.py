"""A small training of a few seconds, for fault tests: Levanter's GPT-2, a checkpoint every other step."""

import contextlib
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml

from qkvflow.cli import run_program
from qkvflow.config import decode
from qkvflow.runs import TrainConfig, load_run
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main

STEPS = 8
RARELY = {"keep": [{"every": 50}], "save_interval": None}  # a checkpointer for longer trainings


class Training:
    """Trainings below the folder `base`, all with the same configuration except for a test's changes."""

    def __init__(self, base: Path):
        self.base = base

    def raw(self, name: str, steps: int = STEPS, **changes) -> dict:
        """The configuration; `changes`: top-level keys, and keys of `trainer`."""
        trainer = {
            "id": name,
            "train_batch_size": 4,
            "num_train_steps": steps,
            "steps_per_eval": 1000,
            "max_eval_batches": 1,
            "checkpointer": {"keep": [{"every": 2}], "save_interval": None},
        }
        raw = {
            "model": {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": 1, "max_seq_len": 32},
            "data": {"cache_dir": str(self.base / "cache")},
            "optimizer": {"learning_rate": 3e-3, "warmup": 2},
            "run_dir": str(self.base / "runs"),
        }
        top = TrainConfig.__dataclass_fields__
        raw |= {key: value for key, value in changes.items() if key in top}
        return {**raw, "trainer": trainer | {key: value for key, value in changes.items() if key not in top}}

    def run(self, name: str, steps: int = STEPS, **changes) -> Path:
        """Trains in this process."""
        return main(decode(TrainConfig, self.raw(name, steps, **changes)))

    def start(self, name: str, steps: int = STEPS, **changes):
        """Trains with the program in a separate process, which has already imported everything."""
        file = self.write(name, steps, **changes)
        process = PROCESSES.Process(target=_train, args=(str(file), str(self.output(name))))
        process.start()
        return process

    def write(self, name: str, steps: int = STEPS, **changes) -> Path:
        """The configuration as a file."""
        file = self.base / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self.raw(name, steps, **changes)))
        return file

    def output(self, name: str) -> Path:
        """The output of this run's processes for users."""
        return self.base / f"{name}.output"

    def path(self, name: str) -> Path:
        return self.base / "runs" / name


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["qkvflow.train_lm"])


def _train(config: str, output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    run_program(main, TrainConfig, ["--config_path", config])


@contextlib.contextmanager
def mounted(folder: Path, *options: str, read_only: bool = False) -> Iterator[Path]:
    """A file system at `folder`; skips the test if mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        if read_only:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def parameters(run: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_run(run).model) if eqx.is_array(leaf)]


def losses(run: Path) -> dict[int, float]:
    records = read_metrics(run / "metrics.jsonl")
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


def assert_same(run: Path, expected: Path) -> None:
    """The same losses and the same final parameters, bit for bit."""
    assert losses(run) == losses(expected)
    for got, want in zip(parameters(run), parameters(expected), strict=True):
        np.testing.assert_array_equal(got, want)


def wait_until(
    condition, process=None, seconds: float = 240.0, told: Callable[[], str] = str, every: float = 0.002
) -> None:
    """Waits for a condition; fails if the process ends, or after so many seconds, with the text from `told`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.exitcode is not None:
            pytest.fail(f"the process ended with {process.exitcode}")
        if time.monotonic() > deadline:
            pytest.fail(f"waited in vain: {told()}")
        time.sleep(every)
