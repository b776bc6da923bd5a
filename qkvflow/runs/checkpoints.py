"""The checkpoints of a run: which are complete, and what to do with what a killed process left."""

import json
import shutil
from datetime import datetime
from pathlib import Path


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps N whose checkpoints `step-N` are complete, in order.

    Levanter writes `metadata.json` last, so it marks a complete checkpoint.
    """
    return sorted(step for step, path in _step_folders(folder) if _is_readable(path / "metadata.json"))


def clean_up(folder: Path) -> None:
    """Mends what being killed in the middle of a save leaves: parts of a checkpoint, or empty metadata.

    A checkpoint without `metadata.json` was never complete, and goes. One whose `metadata.json` is cut short
    is complete, because the file is begun after all data is on disk; the file is written again.
    """
    for step, path in _step_folders(folder):
        metadata = path / "metadata.json"
        if not metadata.exists():
            shutil.rmtree(path)
        elif not _is_readable(metadata):
            record = {"step": step, "timestamp": datetime.now().isoformat(), "is_temporary": False}
            metadata.write_text(json.dumps(record))


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix("step-"), path) for path in folder.glob("step-*") if path.is_dir()]
    return [(int(number), path) for number, path in names if number.isdigit()]


def _is_readable(metadata: Path) -> bool:
    try:
        return "step" in json.loads(metadata.read_text())
    except (OSError, ValueError):
        return False
