"""Keeps library output off the terminal: log lines, warnings and C++ messages go to a log file."""

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from qkvflow.errors import Notice, UserError


class Quiet:
    """What `quiet_libraries` yields: the real terminal, and the place where library output goes."""

    def __init__(self, terminal: TextIO, sink: IO[bytes]):
        self.terminal = terminal
        self._sink = sink
        self._has_log = False

    def log_to(self, path: Path) -> None:
        """From now on library output is appended to `path`, beginning with what has been caught so far."""
        with open(path, "ab") as log:
            log.write(self.caught())
            log.flush()
            self._has_log = True
            os.dup2(log.fileno(), 2)

    def caught(self) -> bytes:
        """The output that was caught so far and is in no log file."""
        sys.stderr.flush()
        if self._has_log:
            return b""
        self._sink.seek(0)
        return self._sink.read()


@contextlib.contextmanager
def notices_on(terminal: TextIO, log: logging.Logger | None = None) -> Iterator[None]:
    """For the length of a `with` block a `Notice` is one line on `terminal`, and in the log; other warnings stay."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if not issubclass(category, Notice):
                return show_others(message, category, *rest)
            # Over the clock of a phase that is running.
            terminal.write(f"\r\x1b[Kwarning: {message}\n" if terminal.isatty() else f"warning: {message}\n")
            terminal.flush()
            if log is not None:
                log.warning("%s", message)
            return None

        warnings.simplefilter("always", Notice)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def quiet_libraries() -> Iterator[Quiet]:
    """Sends everything that is written to standard error elsewhere, for the length of a `with` block.

    It works on the file descriptor, because JAX, XLA, TensorStore and tokenizers write to it from C++, past
    Python's `sys.stderr`. Standard output is left alone. An unexpected error prints what was caught before
    there was a log file, since it may say what happened.

    Yields:
        a `Quiet`, whose `terminal` is the stream for people and whose `log_to` names the log file.
    """
    sys.stderr.flush()
    python_stderr, saved = sys.stderr, os.dup(2)
    terminal = open(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
    sink = tempfile.TemporaryFile()  # noqa: SIM115
    os.dup2(sink.fileno(), 2)
    # Not the old `sys.stderr`, which a test runner or a notebook may have replaced by something of its own.
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    quiet = Quiet(terminal, sink)
    try:
        with notices_on(terminal, logging.getLogger(__name__)):
            yield quiet
    except Exception as error:
        if not isinstance(error, UserError | BrokenPipeError):  # whose output nobody reads
            terminal.write(quiet.caught().decode(errors="replace"))
        raise
    finally:
        root.handlers[:] = handlers  # libraries add their own, too
        root.setLevel(level)
        terminal.close()
        sys.stderr = python_stderr
        os.dup2(saved, 2)
        os.close(saved)
        sink.close()
