"""The launch scripts, with stand-ins for the programs of the cluster that write down how they are called."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment whose PATH begins with these commands; each adds its words to `calls`."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {folder}/calls\n{script}\n')
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def launch(script: str, *words: str, env: dict[str, str], folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run([str(LAUNCH / script), *words], env=env, capture_output=True, text=True, timeout=60)
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(("status", "is_queued"), [(0, False), (2, False), (143, True)])
def test_slurm_queues_again_what_was_stopped_with_a_checkpoint(tmp_path, status, is_queued):
    env = stand_ins(tmp_path, srun=f"exit {status}", scontrol="") | {"SLURM_JOB_ID": "17"}
    code, calls = launch("slurm.sh", "--config_path", "a b.yaml", env=env, folder=tmp_path)
    assert code == status
    assert calls[0] == "srun --kill-on-bad-exit=1 .venv/bin/python -m qkvflow.train_lm --config_path a b.yaml"
    assert ("scontrol requeue 17" in calls) == is_queued


# A TPU that is there after `create`, preempted during the first run, and well from then on.
GCLOUD = """
state() { cat STATE 2>/dev/null || exit 1; }
case "$*" in
  *" describe "*) state ;;
  *" create "*) echo READY > STATE ;;
  *" delete "*) rm STATE ;;
  *qkvflow.train_lm*) [ -e RAN ] && exit 0; touch RAN; echo PREEMPTED > STATE; exit 1 ;;
esac
"""
TPU = {"TPU": "flow", "ZONE": "here", "BUCKET": "bucket", "REPOSITORY": "https://example.org/q.git", "REVISION": "abc"}


def test_a_preempted_tpu_is_created_again(tmp_path):
    script = GCLOUD.replace("STATE", f"{tmp_path}/state").replace("RAN", f"{tmp_path}/ran")
    env = stand_ins(tmp_path, gcloud=script) | TPU
    code, calls = launch("tpu.sh", "train", "--config_path", "a b.yaml", env=env, folder=tmp_path)
    assert code == 0
    stages = [next((s for s in ("create", "delete", "train_lm", "git checkout") if s in call), "") for call in calls]
    assert [s for s in stages if s] == [
        "create",
        "git checkout",
        "train_lm",
        "delete",
        "create",
        "git checkout",
        "train_lm",
    ]
    assert any("--config_path a\\ b.yaml" in call for call in calls), "words arrive as they were given"


def test_a_run_that_fails_is_not_repeated(tmp_path):
    script = GCLOUD.replace("echo PREEMPTED > STATE; ", "").replace("STATE", f"{tmp_path}/state")
    env = stand_ins(tmp_path, gcloud=script.replace("RAN", f"{tmp_path}/ran")) | TPU
    code, calls = launch("tpu.sh", "train", env=env, folder=tmp_path)
    assert code == 1
    assert sum("train_lm" in call for call in calls) == 1
