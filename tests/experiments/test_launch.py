"""The launch scripts, with stand-ins for the programs of the cluster that write down how they are called.

A real Slurm is in `test_slurm.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment whose PATH begins with these commands; each adds its words to `calls`."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f'#!/usr/bin/env bash\necho "{path.name} $*" >> {folder}/calls\n{script}\n')
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def launch(script: str, *words: str, env: dict[str, str], folder: Path) -> tuple[int, list[str], str]:
    """Exit status, calls of stand-ins, standard error."""
    done = subprocess.run([str(LAUNCH / script), *words], env=env, capture_output=True, text=True, timeout=60)
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], done.stderr


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    subprocess.run([str(shellcheck), *map(str, LAUNCH.glob("*.sh"))], check=True)


# srun: a task that ends with this status; true: what asks whether all nodes answer, which they do before the task.
SRUN = 'case "$*" in *qkvflow*) touch "$0.ran"; {task} ;; *true) [ ! -e "$0.ran" ] || exit {answer} ;; esac'
ASKED = "srun --overlap --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=0 true"


@pytest.mark.parametrize(
    ("status", "answer", "is_queued"),
    [(0, 0, False), (2, 0, False), (143, 0, False), (1, 1, True)],
    ids=["finished", "mistake", "one failed and the others were stopped", "a node died"],
)
def test_slurm_queues_again_what_lost_a_node_and_nothing_else(tmp_path, status, answer, is_queued):
    srun = SRUN.format(task=f"exit {status}", answer=answer)
    env = stand_ins(tmp_path, srun=srun, scontrol="") | {"SLURM_JOB_ID": "17"}
    code, calls, _ = launch("slurm.sh", "--config_path", "a b.yaml", env=env, folder=tmp_path)
    assert code == status
    assert calls[:2] == [ASKED, "srun --kill-on-bad-exit=1 .venv/bin/python -m qkvflow.train_lm --config_path a b.yaml"]
    assert ("scontrol requeue 17" in calls) == is_queued


def test_slurm_queues_again_after_its_notice_even_what_does_not_stop(tmp_path):
    """The tasks here hear nothing; the job ends in 16 s, of which the script leaves 15."""
    notice = "kill -USR1 $(ps -o ppid= -p $PPID); sleep 3; exit 143"
    srun = SRUN.format(task=notice, answer=0)
    end = "date -d '16 seconds' +%Y-%m-%dT%H:%M:%S"
    env = stand_ins(tmp_path, srun=srun, scontrol="", scancel="", squeue=end) | {"SLURM_JOB_ID": "17"}
    code, calls, _ = launch("slurm.sh", env=env, folder=tmp_path)
    assert code == 143
    assert calls[2:] == ["scancel --signal=TERM 17", "squeue --noheader --job=17 --format=%e"] + 2 * [
        "scontrol requeue 17"  # a second before the end, and when the tasks have stopped
    ]


@pytest.mark.parametrize(("refusals", "asked"), [(2, 3), (100, 5)], ids=["boots", "stays away"])
def test_slurm_waits_for_a_node_that_boots(tmp_path, refusals, asked):
    srun = f'case "$*" in *true) echo >> "$0.asked"; [ "$(wc -l < "$0.asked")" -gt {refusals} ] ;; *) exit 1 ;; esac'
    env = stand_ins(tmp_path, srun=srun, scontrol="", sleep="") | {"SLURM_JOB_ID": "17"}
    code, calls, _ = launch("slurm.sh", env=env, folder=tmp_path)
    first = next(number for number, call in enumerate(calls) if "qkvflow.train_lm" in call)
    assert calls[:first].count(ASKED) == asked
    assert code == 1
    assert ("scontrol requeue 17" in calls) == (refusals > asked)


def test_slurm_tells_a_mistake_of_all_processes_once(tmp_path):
    task = "echo 'error: no' >&2; echo 'error: no' >&2; echo 'error: other' >&2; exit 2"
    env = stand_ins(tmp_path, srun=SRUN.format(task=task, answer=0)) | {"SLURM_JOB_ID": "17"}
    assert launch("slurm.sh", env=env, folder=tmp_path)[2] == "error: no\nerror: other\n"


# Google's cloud: each thing has a file with its state; states that pass by themselves are lines before the last.
GCLOUD = """
turn() { [ -e "$1" ] || { echo "ERROR: NOT_FOUND: not there" >&2; exit 1; }
  head -n 1 "$1"; [ "$(wc -l < "$1")" -eq 1 ] || sed -i 1d "$1"; }
cd FOLDER
case "$*" in
  *"queued-resources describe"*) turn queue ;;
  *"tpu-vm describe"*) turn state ;;
  *"queued-resources create"*) printf 'WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n' > queue; echo READY > state ;;
  *"queued-resources delete"*) rm queue state ;;
  *"tpu-vm create"*) [ ! -s refusals ] || { head -n 1 refusals >&2; sed -i 1d refusals; exit 1; }; echo READY > state ;;
  *"tpu-vm delete"*) rm state ;;
  *" scp "*) cat "$5" >> keys ;;
  *qkvflow.train_lm*) [ ! -s ends ] || { head -n 1 ends > WHERE; sed -i 1d ends; exit 1; } ;;
esac
"""
TPU = {"TPU": "flow", "ZONE": "here", "BUCKET": "bucket", "REPOSITORY": "https://example.org/q.git", "REVISION": "abc"}
STAGES = ("create", "delete", "train_lm", "git checkout")


def tpu(folder: Path, *words: str, **env: str) -> tuple[int, list[str], list[str], str]:
    """Exit status, stages, all calls, standard error."""
    gcloud = GCLOUD.replace("FOLDER", str(folder)).replace(
        "WHERE", "queue" if "v5p" in env.get("TYPE", "") else "state"
    )
    env = stand_ins(folder, gcloud=gcloud) | TPU | {"RETRY_SECONDS": "0"} | env
    code, calls, said = launch("tpu.sh", *words, env=env, folder=folder)
    stages = [next((s for s in STAGES if s in call), "") for call in calls]
    return code, [s for s in stages if s], calls, said


def test_a_preempted_tpu_is_created_again(tmp_path):
    (tmp_path / "ends").write_text("PREEMPTED\n")
    code, stages, calls, _ = tpu(tmp_path, "train", "--config_path", "a b.yaml")
    assert code == 0
    once = ["create", "git checkout", "train_lm"]
    assert stages == [*once, "delete", *once]
    assert any("--config_path a\\ b.yaml" in call for call in calls), "words arrive as they were given"
    assert "--accelerator-type v4-8 --version tpu-ubuntu2204-base" in "\n".join(calls)


def test_a_run_that_fails_is_not_repeated(tmp_path):
    (tmp_path / "ends").write_text("READY\n")
    code, stages, _, said = tpu(tmp_path, "train")
    assert code == 1
    assert stages.count("train_lm") == 1
    assert "not for want of the TPU" in said


@pytest.mark.parametrize("state", ["CREATING", "RESTARTING", "REPAIRING", "STARTING"])
def test_a_tpu_on_its_way_is_waited_for(tmp_path, state):
    (tmp_path / "state").write_text(f"{state}\n{state}\nREADY\n")
    code, stages, _, said = tpu(tmp_path, "train")
    assert code == 0
    assert stages == ["git checkout", "train_lm"]
    assert f"the TPU is {state}" in said


def test_a_stopped_tpu_is_left_alone(tmp_path):
    (tmp_path / "state").write_text("STOPPED\n")
    code, stages, _, said = tpu(tmp_path, "train")
    assert (code, stages) == (1, [])
    assert "the TPU is STOPPED: start it" in said


CAPACITY = 'Error code 8, message: There is no more capacity in the zone "here"'
QUOTA = "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPerProject' has been exceeded. Limit: 0 in zone here."
DENIED = "ERROR: PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"


@pytest.mark.parametrize(("refusals", "creations"), [([CAPACITY] * 3, 4), ([CAPACITY, QUOTA], 2), ([DENIED], 1)])
def test_only_want_of_capacity_is_waited_for(tmp_path, refusals, creations):
    (tmp_path / "refusals").write_text("".join(f"{line}\n" for line in refusals))
    code, stages, _, said = tpu(tmp_path, "create")
    assert code == (0 if set(refusals) == {CAPACITY} else 1)
    assert stages.count("create") == creations
    assert all(line in said for line in refusals)


def test_what_cannot_be_asked_is_not_taken_for_missing(tmp_path):
    env = stand_ins(tmp_path, gcloud="echo 'ERROR: Reauthentication required' >&2; exit 1") | TPU
    code, calls, said = launch("tpu.sh", "train", env=env, folder=tmp_path)
    assert code == 1
    assert len(calls) == 1
    assert "Reauthentication required" in said


def test_v5p_is_asked_for_by_a_queued_resource(tmp_path):
    (tmp_path / "ends").write_text("SUSPENDED\n")
    code, stages, calls, said = tpu(tmp_path, "train", TYPE="v5p-16", SPOT="1")
    assert code == 0
    once = ["create", "git checkout", "train_lm"]
    assert stages == [*once, "delete", *once]
    create = "queued-resources create flow --zone here --node-id flow --accelerator-type v5p-16 --runtime-version"
    assert sum(f"{create} v2-alpha-tpuv5 --spot" in call for call in calls) == 2
    assert sum("queued-resources delete flow --zone here --force" in call for call in calls) == 1
    assert "the TPU is WAITING_FOR_RESOURCES" in said


def test_keys_go_to_the_workers_and_into_no_command_line(tmp_path):
    _, _, calls, _ = tpu(tmp_path, "train", WANDB_API_KEY="se cret", HF_TOKEN="hidden")
    assert (tmp_path / "keys").read_text() == "export WANDB_API_KEY=se\\ cret\nexport HF_TOKEN=hidden\n"
    assert not any("cret" in call or "hidden" in call for call in calls)


# sudo installs nothing, but what is installed is there from then on.
SUDO = """
appear() { printf '#!/bin/sh\\necho "%s $*" >> FOLDER/calls\\n' "$1" > "FOLDER/$1"; /bin/chmod +x "FOLDER/$1"; }
[ "$1" != tee ] || /bin/cat >/dev/null
case "$*" in *install*python3.12*) appear python3.12 ;; *install*gcsfuse*) appear gcsfuse ;; esac
"""


def worker(folder: Path, *there: str) -> list[str]:
    """The calls of `tpu_worker.sh` on a machine that has make, git, curl and these programs."""
    scripts = dict.fromkeys(["make", "git", "curl", *there], "") | {
        "sudo": SUDO.replace("FOLDER", str(folder)),
        "apt-cache": "exit 100",  # such a package is not known
        "lsb_release": "echo jammy",
        "mountpoint": "exit 1",
    }
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "env", "mkdir"):
        (programs / name).symlink_to(str(shutil.which(name)))
    (folder / "home" / "qkvflow").mkdir(parents=True)
    env = stand_ins(folder, **scripts) | TPU | {"PATH": f"{folder}:{programs}", "HOME": str(folder / "home")}
    code, calls, said = launch("tpu_worker.sh", env=env, folder=folder)
    assert code == 0, said
    return calls


def test_a_bare_worker_gets_python_and_gcsfuse_from_where_they_are(tmp_path):
    calls = worker(tmp_path)
    marks = [
        "sudo add-apt-repository -y ppa:deadsnakes/ppa",
        "install -y python3.12 python3.12-venv",
        "curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg",
        "sudo tee /etc/apt/sources.list.d/gcsfuse.list",
        "install -y fuse gcsfuse",
        "gcsfuse --implicit-dirs --rename-dir-limit 100000 bucket",
        "git checkout -q abc",
        "make setup EXTRA=dev,tpu",
    ]
    found = [next((i for i, call in enumerate(calls) if mark in call), None) for mark in marks]
    assert None not in found, (calls, found)
    assert found == sorted(found)


def test_on_a_worker_that_has_all_nothing_is_installed(tmp_path):
    calls = worker(tmp_path, "python3.11", "gcsfuse")
    assert not any(call.startswith("sudo") for call in calls)
    assert any("make setup" in call for call in calls)
