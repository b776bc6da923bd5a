"""A job of two tasks on Iris's local cluster (experiments/launch/iris.md), continued when one of them was killed."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.training import RARELY, Training, assert_same, wait_until

from qkvflow.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.program]
pytest.importorskip("iris", reason="marin-iris is not installed")

ROOT = Path(__file__).parents[2]
STEPS = 300
PATIENCE = 900  # seconds


class Cluster:
    """A local cluster; folder: for the files of its jobs, not below /tmp."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "workspace").mkdir()
        self.env = os.environ | {"HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        log = folder / "cluster.log"
        with open(log, "w") as file:
            words = [sys.executable, str(ROOT / "experiments" / "launch" / "iris_local.py")]
            self._process = subprocess.Popen(words, stdout=file, stderr=file, env=self.env)
        self.url = ""
        deadline = time.monotonic() + 120
        while not self.url:
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            found = re.search(r"Controller started at (\S+)", log.read_text())
            self.url = found[1] if found else ""
            time.sleep(0.2)

    def submit(self, name: str, *words: str) -> subprocess.Popen:
        """Trains the run of this name by two tasks; the process follows the job, and ends as it does."""
        file = Training(self.folder).write(name, STEPS, checkpointer=RARELY)
        variables = [f"{key}={self.env[key]}" for key in ("PYTHONPATH", "JAX_PLATFORMS", "XLA_FLAGS", "HF_HUB_OFFLINE")]
        flags = [word for pair in variables for word in ("-e", *pair.split("=", 1))]
        train = [sys.executable, "-m", "qkvflow.train_lm", "--config_path", str(file), *words]
        iris = [shutil.which("iris", path=str(Path(sys.executable).parent)) or "iris", "--controller-url", self.url]
        command = [
            *iris,
            "job",
            "run",
            "--replicas=2",
            "--cpu=1",
            "--max-retries=1",
            f"--job-name={name}",
            *flags,
            "--",
        ]
        return subprocess.Popen(
            [*command, *train], cwd=self.folder / "workspace", env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kill_task(self, name: str, index: int) -> None:
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if re.search(rf"IRIS_TASK_ID=/[^/]+/{name}/{index}\0".encode(), path.read_bytes()):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.stop()


def test_a_run_of_two_tasks_is_continued_when_one_is_killed(cluster):
    said, _ = cluster.submit("whole").communicate(timeout=PATIENCE)
    assert f"{STEPS} steps on 2 x cpu" in said, said[-3000:]
    job = cluster.submit("disturbed")
    metrics = cluster.folder / "runs" / "disturbed" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and any(r["step"] >= 120 for r in read_metrics(metrics)), seconds=PATIENCE)
    cluster.kill_task("disturbed", 1)
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said[-3000:]
    assert re.search(r"continues after step 1[05]0", said)
    assert_same(cluster.folder / "runs" / "disturbed", cluster.folder / "runs" / "whole")


def test_a_typo_ends_the_job_with_one_line(cluster):
    job = cluster.submit("typo", "--trainer.num_train_step", "20")
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert "did you mean `trainer.num_train_steps`?" in said
    assert not re.search(r"task=.*Traceback", said)
