"""A run in a bucket: its small files are kept in a local folder, and copied to the bucket when they must be saved.

Checkpoints are no part of this: TensorStore writes and reads them where they are.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkvflow.files import fresh_name, is_fresh
from qkvflow.places import Place

_THREADS = 8
_NOT_READ = ("checkpoints/", "damaged/", "tensorboard/", "profiler/")  # used where they are, or only ever added to
_LAST = "config.yaml"  # makes a folder a run
LOCK = ".lock"


class Mirror:
    """The small files of a run in a bucket, and their copies in a folder."""

    def __init__(self, place: Place, folder: Path):
        self.place, self.folder = place, folder
        self._same: dict[str, tuple[int, int]] = {}  # file: size and time of change of its copy, as it was copied
        self._lock = threading.Lock()

    def pull(self) -> None:
        """Copies the files of the bucket into the folder, which is made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = self.place.files_outside([name.rstrip("/") for name in _NOT_READ])

        def copy(name: str) -> None:
            content, path = self.place.read(name), self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(fresh_name(path.name))
            fresh.write_bytes(content)
            os.replace(fresh, path)
            self._same[name] = _state(path)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, [name for name in entries if name != LOCK]))

    def push(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Copies what has changed in the folder to the bucket.

        Args:
            wanted: which, by their names.
        """
        with self._lock:
            paths = [path for path in self.folder.rglob("*") if path.is_file() and not is_fresh(path.name)]
            states = {path.relative_to(self.folder).as_posix(): _state(path) for path in paths}
            changed = [name for name, state in states.items() if self._same.get(name) != state and wanted(name)]
            others = [name for name in changed if name != _LAST]

            def copy(name: str) -> None:
                self.place.write(name, (self.folder / name).read_bytes())
                self._same[name] = states[name]

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(copy, others))
            if _LAST in changed:
                copy(_LAST)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
