"""The wheel: it holds every module, page and configuration, and works outside of the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qkvflow_command import COMMANDS, VERSION

ROOT = Path(__file__).parent.parent
NOT_SHIPPED = {"__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tracked files, as `make dist` does, by an environment of its own."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, files)):
        if name.startswith(("tests/", "experiments/", "docs/")) or not (ROOT / name).is_file():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(base), str(source)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=base, env=environment)
    return base / f"qkvflow-{VERSION}-py3-none-any.whl"


@pytest.mark.slow  # fetches setuptools
def test_the_wheel_holds_everything(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {p.relative_to(ROOT).as_posix() for p in (ROOT / "qkvflow").rglob("*") if p.is_file()}
    expected = {name for name in code if not NOT_SHIPPED & set(name.split("/"))}
    configs = {f"qkvflow/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "configs").rglob("*.yaml")}
    assert expected | configs | {"qkvflow_command.py"} == {name for name in names if ".dist-info/" not in name}
    metadata = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"qkvflow = qkvflow_command:main" in zipfile.ZipFile(wheel).read(metadata)


@pytest.mark.slow
@pytest.mark.program
def test_the_wheel_trains_outside_of_the_repository(wheel, tmp_path):
    """In a folder with nothing but the wheel's content; the libraries are those of this environment."""
    package, work = tmp_path / "package", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(package)
    work.mkdir()
    environment = os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "qkvflow_command", *words]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"qkvflow {VERSION}\n"
    small = ("--trainer.num_train_steps", "4", "--trainer.max_eval_batches", "1")
    assert "runs/quickstart" in run("train", *small, "--model.hidden_dim", "16")
    assert (work / "runs" / "quickstart" / "config.yaml").is_file()
    assert run("sample", "--run", "runs/quickstart", "--prompt", "The", "--max_new_tokens", "4").startswith("The")
    assert "wikitext2/neuralode" in run("describe", "--config_path", "wikitext2/neuralode", "wikitext2/standard")
    assert "qkvflow finetune" in run("finetune", "--help")
    assert set(COMMANDS) >= {"train", "eval", "sample", "serve", "describe", "finetune", "convert", "lift", "report"}
