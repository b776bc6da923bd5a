"""A run in a bucket: its small files are worked on in a folder of this machine, and copied to the bucket when they must last.

Checkpoints are no part of this: TensorStore writes and reads them where they are.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkvflow.runs.places import Place

_THREADS = 8
_ELSEWHERE = ("checkpoints/", "damaged/")  # are used where they are
_LAST = "config.yaml"  # makes a folder a run


class Mirror:
    """The small files of a run in a bucket, and their copies in a folder."""

    def __init__(self, place: Place, folder: Path):
        self.place, self.folder = place, folder
        self._same: dict[str, tuple[int, int]] = {}  # file: size and time of change of its copy, as it was copied
        self._lock = threading.Lock()

    def pull(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Copies the files of the bucket into the folder.

        Args:
            wanted: which, by their names.
        """
        names = [name for name in self.place.files() if not name.startswith(_ELSEWHERE) and wanted(name)]

        def copy(name: str) -> None:
            content, path = self.place.read(name), self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.{os.getpid()}")  # others may read the folder
            fresh.write_bytes(content)
            os.replace(fresh, path)
            self._same[name] = _state(path)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, names))

    def push(self) -> None:
        """Copies what has changed in the folder to the bucket."""
        with self._lock:
            states = {str(p.relative_to(self.folder)): _state(p) for p in self.folder.rglob("*") if p.is_file()}
            changed = sorted(name for name, state in states.items() if self._same.get(name) != state)
            for name in sorted(changed, key=lambda name: name == _LAST):
                self.place.write(name, (self.folder / name).read_bytes())
                self._same[name] = states[name]


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
