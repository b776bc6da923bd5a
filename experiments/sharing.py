"""Work shared between processes: the same command, started several times with one `run_dir`, on one machine.

A training is made by the process that holds its claim, a file lock, which is gone with that process however it ends.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from qkvflow.locks import Taken, locked

T = TypeVar("T")
_SECONDS_BETWEEN_LOOKS = 2.0


def in_turn(
    tasks: Sequence[T], claims: Callable[[T], Sequence[str]], folder: Path, waits: Callable[[int], bool]
) -> Iterator[T]:
    """Each task once, in a time in which this process holds its claims. Tasks of which another process holds a claim
    come later, so that what was done there is there.

    Args:
        claims: names of what must not be made twice at once. folder: of the locks; made.
        waits: called once with the number of tasks if all that are left belong to others: whether to wait for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left, is_told = list(tasks), False
    while left:
        later = []
        for task in left:
            with contextlib.ExitStack() as stack:
                try:
                    for name in sorted({*claims(task)}):
                        stack.enter_context(locked(folder / f"{name}.lock", wait=False))
                except Taken:
                    later.append(task)
                    continue
                yield task
        if len(later) == len(left):
            if not is_told and not waits(len(later)):
                return
            is_told = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        left = later
