"""`slurm.sh` on a real Slurm with two nodes, both on this machine: a run of two tasks, and what happens to its job."""

import re
from pathlib import Path

import pytest
from support.slurm import NODES, Slurm, slurm
from support.training import RARELY, Training, assert_same, wait_until

from qkvflow.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.program]
STEPS = 400
PATIENCE = 600  # seconds; a start takes 20 on a quiet machine


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def cluster(base):
    (base / "cluster").mkdir()
    with slurm(base / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(cluster, base) -> Path:
    """A run that nothing happened to."""
    job = Job(cluster, base, "whole")
    job.wait("COMPLETED")
    return job.run


class Job:
    """A job that trains the run of this name."""

    def __init__(self, cluster: Slurm, base: Path, name: str, *words: str, **options: str | int):
        training = Training(base)
        file, self.log = training.write(name, STEPS, checkpointer=RARELY), base / f"{name}.log"
        self.cluster, self.run = cluster, training.path(name)
        self.number = cluster.submit("--config_path", str(file), *words, log=self.log, **options)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def continued(self) -> list[int]:
        """The steps after which the run was continued."""
        return [int(step) for step in re.findall(r"continues after step (\d+)", self.said)]

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    def until(self, condition) -> None:
        wait_until(condition, seconds=PATIENCE, every=0.2, told=lambda: f"{self.cluster.job(self.number)}\n{self.said}")

    def wait(self, state: str) -> None:
        ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        self.until(lambda: self.cluster.job(self.number)["JobState"] in ends)
        assert self.cluster.job(self.number)["JobState"] == state, self.said

    def until_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.until(lambda: metrics.is_file() and any(r["step"] >= step for r in read_metrics(metrics)))

    def until_restart(self, number: int) -> None:
        self.until(lambda: self.restarts == number)


def test_two_tasks_train_one_run_and_each_gets_its_cpus(cluster, base):
    job = Job(cluster, base, "cpus", "--trainer.num_train_steps", "20", cpus_per_task=2)
    job.until(lambda: "Preparing data" in job.said)
    # The first step has asked whether the nodes are there.
    step = cluster.control("scontrol", "--oneliner", "show", "step", f"{job.number}.1")
    assert "CPUs=4 " in step, step
    job.wait("COMPLETED")
    assert "20 steps on 2 x cpu" in job.said
    assert (job.run / "train.1.log").is_file()


def test_a_typo_ends_the_job_and_is_told_once(cluster, base):
    job = Job(cluster, base, "typo", "--trainer.num_train_step", "20")
    job.wait("FAILED")
    errors = [line for line in job.said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "did you mean `trainer.num_train_steps`?" in errors[0]
    assert "Traceback" not in job.said
    assert job.restarts == 0


def test_whatever_happens_to_its_job_a_run_ends_as_one_that_nothing_happened_to(cluster, base, whole):
    job = Job(cluster, base, "disturbed")
    job.until_step(120)
    cluster.control("scontrol", "requeue", job.number)
    job.until_restart(1)

    # Slurm's notice, while the step compiles in a run that is continued.
    job.until(lambda: re.search(r"continues after step \d+.*Compiling the training step", job.said, re.DOTALL))
    cluster.control("scancel", "--batch", "--signal=USR1", job.number)
    job.until_restart(2)
    (step,) = job.continued
    assert f"Stopped by SIGTERM after step {step + 1}; a checkpoint was written" in job.said

    job.until(lambda: len(job.continued) == 2)
    assert job.continued[-1] == step + 1
    job.until_step(step + 80)  # and so beyond the next checkpoint
    cluster.kill_node(NODES[1])
    job.until_restart(3)
    cluster.start_node(NODES[1])

    job.wait("COMPLETED")
    assert len(job.continued) == 3
    assert_same(job.run, whole)


def test_a_job_is_queued_again_at_its_time_limit(cluster, base, whole):
    """One minute is too short to begin with: the first start is over before it has made its steps."""
    job = Job(cluster, base, "short", time=1, signal="B:USR1@30")
    job.until_restart(1)
    cluster.control("scontrol", "update", f"jobid={job.number}", "timelimit=60")
    job.wait("COMPLETED")
    assert_same(job.run, whole)
