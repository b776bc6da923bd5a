"""The compilers for TPUs and GPUs, which run without the hardware: their location, and how a process loads them.

They are in a separate folder, where no process that trains or tests finds them: JAX loads every plugin that it can
import. `make setup EXTRA=dev,targets` installs them there. On a TPU or GPU machine, those of the environment are used.
"""

import importlib.util
import os
import sys
from pathlib import Path

from qkvflow.errors import UserError

FOLDER = "QKVFLOW_TARGETS"
_PARTS = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_plugins/xla_cuda12")}
_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no TPU for which two processes could compete
}


def compiler_environment(platform: str) -> dict[str, str]:
    """Environment variables for a process that compiles for `tpu` or `gpu`; prepend its PYTHONPATH to the existing one.

    Raises:
        UserError: the compiler is not installed.
    """
    folder = _folder(platform)
    # What Levanter would measure on the device, which is absent.
    common = {"LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if platform == "tpu":
        return common | _TPU | {"TPU_LIBRARY_PATH": str(folder / "libtpu" / "libtpu.so")}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return common | {"XLA_FLAGS": flags, "PYTHONPATH": str(folder)}


def _folder(platform: str) -> Path:
    places = [Path(sys.prefix) / "targets"]
    if os.environ.get(FOLDER):
        places.insert(0, Path(os.environ[FOLDER]))
    places += [Path(root) for root in _importable(_PARTS[platform][0])]
    for place in places:
        if all((place / part).is_dir() for part in _PARTS[platform]):
            return place
    name = {"tpu": "TPUs", "gpu": "GPUs"}[platform]
    raise UserError(
        f"--target needs the compiler for {name}, which is not installed: make setup EXTRA=dev,targets (about 1.2 GB on"
        " disk; training does not load it)"
    )


def _importable(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    return [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent.parent)]
