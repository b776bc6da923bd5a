"""A process of its own with as many virtual CPU devices as wanted: JAX settles their number once, when it starts."""

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
from qkvflow.meshes.report import MeshReport
from qkvflow.meshes.shape import MeshShape
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory

_COUNT = "--xla_force_host_platform_device_count"
_GATHERED = b"Involuntary full rematerialization"


def describe_mesh(config: TrainConfig, tokens: int, shape: MeshShape, run: RunDirectory | None = None) -> MeshReport:
    """What a training step of `config` costs on a mesh of that shape; see `compile_ahead`.

    Args:
        run: the run whose configuration it is, if it is that of one.

    Raises:
        UserError: a configuration that cannot be trained on that mesh, and if this machine has too little memory to
            compile.
    """
    trainer = dataclasses.replace(shape.applied(config.trainer), require_accelerator=False)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        given, found = Path(folder) / "config.yaml", Path(folder) / "report.json"
        write_config(given, dataclasses.replace(config, trainer=trainer))
        words = ["--given", str(given), "--tokens", str(tokens), "--found", str(found)]
        words += [] if run is None else ["--run", str(run.place)]
        status = _run([sys.executable, "-m", "qkvflow.meshes", *words], shape.devices, output)
        output.seek(0)
        said = output.read()
        if status == 0:
            report = MeshReport.read(json.loads(found.read_text()))
            return dataclasses.replace(report, rematerialised=said.count(_GATHERED))
    text = said.decode(errors="replace")
    if status == 2 and "error: " in text:
        raise UserError(re.split(r"^error: ", text, flags=re.MULTILINE)[-1].strip())
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise UserError("compiling was killed, usually because this machine has too little memory for it")
    raise RuntimeError(f"compiling for {shape.devices} virtual devices failed with status {status}:\n{text[-6000:]}")


def _run(command: list[str], devices: int, output: IO[bytes]) -> int:
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
    root = str(Path(qkvflow.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{_COUNT}={devices}"]),
        "PYTHONPATH": path,
    }
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
