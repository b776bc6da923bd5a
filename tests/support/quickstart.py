"""The quickstart as a program."""

import os
import subprocess
import sys
from pathlib import Path

from support.configs import ROOT


def train(base: Path, name: str, *options: str, devices: int = 1) -> Path:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "qkvflow.train_lm", "--config_path", str(ROOT / "configs" / "quickstart.yaml")]
    settings = {"run_dir": base, "trainer.id": name, "data.cache_dir": base / "cache", "trainer.max_eval_batches": 2}
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return base / name
