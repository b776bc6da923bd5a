"""A real Slurm on this machine: a controller and two nodes, 127.0.0.1 and 127.0.0.2, with two CPUs each."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.training import wait_until

ROOT = Path(__file__).parents[2]
INSTALL = ["apt-get", "install", "--yes", "--no-install-recommends", "slurm-wlm", "munge"]
NODES = ("127.0.0.1", "127.0.0.2")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """The cluster; `stop` ends all its processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        munge = folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = {name: munge / name for name in ("key", "socket", "pid", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._pid_files = [munge / "pid"]
        self._run("munged", "--force", *options)
        host, (first, *ports) = socket.gethostname().split(".")[0], _free_ports(3)
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=2"
            for node, port in zip(NODES, ports, strict=True)
        ]
        conf = CONF.format(folder=folder, host=host, user=getpass.getuser(), port=first, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        (folder / "state").mkdir()
        self._run("slurmctld", "-c")
        self._pid_files.append(folder / "slurmctld.pid")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self._run("sinfo", "--noheader", "--format=%A").strip() == "0/2", seconds=60)

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-N", node)
        self._pid_files.append(self.folder / f"{node}.pid")

    def kill_node(self, node: str) -> None:
        """Like a power failure: its daemon, its steps and their processes end at once."""
        pids = [int((self.folder / f"{node}.pid").read_text()), *self._processes(f"SLURMD_NODENAME={node}")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def submit(self, *words: str, log: Path, **options: str | int) -> str:
        """The id of a job that runs slurm.sh with these words."""
        options = {"nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "output": log} | options
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return self._run("sbatch", "--parsable", *flags, "experiments/launch/slurm.sh", *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """Slurm's description of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self._run("scontrol", "--oneliner", "show", "job", number)))

    def control(self, *words: str) -> str:
        return self._run(*words)

    def stop(self) -> None:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=self.env, capture_output=True, timeout=60)
        time.sleep(1)
        for pid in self._processes(f"SLURM_CONF={self.folder}/slurm.conf"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for file in self._pid_files:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def _run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def _processes(self, variable: str) -> list[int]:
        """Processes of this cluster with this variable in their environment, except the tests themselves."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                has = path.read_bytes().split(b"\0")
                if {variable.encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()} <= set(has):
                    found.append(int(path.parent.name))
        return found


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Installs Slurm if possible (docs/scale.md), and starts it; skips the test if it is not available."""
    if shutil.which("slurmctld") is None or shutil.which("munged") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"there is no Slurm here, and it cannot be installed: as root, {' '.join(INSTALL)}")
        done = subprocess.run(INSTALL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True)
        if done.returncode:
            pytest.skip(f"Slurm could not be installed: {done.stderr.decode()[-300:]}")
    cluster = Slurm(folder)
    try:
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return sorted(sock.getsockname()[1] for sock in sockets)
