"""Runs that an earlier version of this package made: `old_runs`, with a README."""

import json
import shutil
from pathlib import Path

OLD = Path(__file__).with_name("old_runs")
EXPECTED = json.loads((OLD / "expected.json").read_text())
RUNS = ("flow", "lora", "gpt2", "hybrid")


def restore(folder: Path) -> Path:
    """The folder as it was: `runs/flow` and so on, the texts and the configurations beside them."""
    shutil.copytree(OLD, folder, dirs_exist_ok=True)
    (folder / "runs").mkdir()
    for name in RUNS:
        (folder / name).rename(folder / "runs" / name)
    return folder
