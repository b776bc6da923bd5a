"""What differs while a program imports its libraries, which takes seconds.

Ctrl-C prints one line, no traceback. An exception will not do: it is raised in the middle of whatever is being
imported, and some libraries make another one of it.

The garbage collector is off, and afterwards leaves what was imported alone: it would look through a million objects
again and again, of which none is garbage.
"""

import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

STATUS, MESSAGE = 130, "\nstopped by Ctrl-C\n"


def imports_begin() -> None:
    """Called first, where a program of this package is about to import the rest. Elsewhere nothing changes."""
    words = sys.orig_argv
    wanted = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    # While Python looks for the module of `-m`, that is all that argv says.
    is_module = sys.argv[:1] == ["-m"] and bool(wanted) and wanted[0].startswith("qkvflow.")
    is_program = is_module or Path(next(iter(sys.argv), "")).stem in ("qkvflow", "qkvflow_command")
    if not is_program:
        return
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def imports_end() -> None:
    """Ctrl-C is `KeyboardInterrupt` again, and garbage is collected."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    os.write(2, MESSAGE.encode())
    os._exit(STATUS)
