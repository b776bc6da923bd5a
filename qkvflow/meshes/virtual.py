"""Starts the compiling process, which must be separate from training.

JAX fixes the number of virtual CPUs at startup, and a process that has loaded another machine's compiler must not
train.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import qkvflow
from qkvflow.config import write_config
from qkvflow.errors import UserError
from qkvflow.meshes.compilers import compiler_environment
from qkvflow.meshes.report import MeshReport
from qkvflow.meshes.shape import MeshShape
from qkvflow.meshes.target import Target
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory

_COUNT = "--xla_force_host_platform_device_count"
_GATHERED = b"Involuntary full rematerialization"


def describe_mesh(
    config: TrainConfig,
    tokens: int,
    shape: MeshShape,
    run: RunDirectory | None = None,
    target: Target | None = None,
    slots: int | None = None,
    dtype: str | None = None,
) -> MeshReport:
    """The cost of a training step of `config` on a mesh of that shape; see `compile_ahead`.

    Args:
        run: the run that the configuration belongs to, if any.
        target: the machine to compile for; virtual CPUs by default.
        slots: number of texts of a decoding step on one of the target's devices, compiled instead of the training step;
            dtype: of its model.

    Raises:
        UserError: a configuration that cannot be trained on that mesh, a missing compiler, or too little memory on this
            machine to compile.
    """
    environment = compiler_environment(target.chip.platform) if target else _virtual(shape.devices)
    trainer = dataclasses.replace(shape.applied(config.trainer), require_accelerator=False)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        given, found = Path(folder) / "config.yaml", Path(folder) / "report.json"
        write_config(given, dataclasses.replace(config, trainer=trainer))
        words = ["--given", str(given), "--tokens", str(tokens), "--found", str(found)]
        words += [] if run is None else ["--run", str(run.place)]
        words += [] if target is None else ["--target", str(target)]
        words += [] if slots is None else ["--slots", str(slots)]
        words += [] if dtype is None else ["--dtype", dtype]
        status = _run([sys.executable, "-m", "qkvflow.meshes", *words], environment, output)
        output.seek(0)
        said = output.read()
        if status == 0:
            report = MeshReport.read(json.loads(found.read_text()))
            return dataclasses.replace(report, rematerialised=said.count(_GATHERED))
    text = said.decode(errors="replace")
    if status == 2 and "error: " in text:
        raise UserError(re.split(r"^error: ", text, flags=re.MULTILINE)[-1].strip())
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise UserError("compiling was killed, usually because this machine has too little memory")
    raise RuntimeError(
        f"compiling for {target or f'{shape.devices} virtual devices'} failed with status {status}:\n{text[-6000:]}"
    )


def _virtual(devices: int) -> dict[str, str]:
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
    return {"XLA_FLAGS": " ".join([*flags, f"{_COUNT}={devices}"])}


def _run(command: list[str], environment: dict[str, str], output: IO[bytes]) -> int:
    root = str(Path(qkvflow.__file__).parent.parent)
    path = [root, os.environ.get("PYTHONPATH"), environment.get("PYTHONPATH")]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
