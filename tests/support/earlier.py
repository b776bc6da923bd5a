"""Runs made by an earlier version of this package: `old_runs`, with a README."""

import json
import shutil
from pathlib import Path

OLD = Path(__file__).with_name("old_runs")
EXPECTED = json.loads((OLD / "expected.json").read_text())
RUNS = ("flow", "lora", "gpt2", "hybrid")


def restore(folder: Path) -> Path:
    """Restores the folder: `runs/flow` and so on, with the texts and configurations."""
    shutil.copytree(OLD, folder, dirs_exist_ok=True)
    (folder / "runs").mkdir()
    for name in RUNS:
        (folder / name).rename(folder / "runs" / name)
    return folder
