"""The outermost frame of every program: parse, run, report errors in one line, exit cleanly."""

import contextlib
import faulthandler
import io
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from inspect import getdoc
from typing import Any, NoReturn, TypeVar

from qkvflow.cli.arguments import parse
from qkvflow.cli.keys import key_table, sections
from qkvflow.cli.quiet import notices_on
from qkvflow.errors import UserError, shortened
from qkvflow.files import remove_scratch, says_disk_is_full
from qkvflow.interrupts import MESSAGE, STATUS, imports_end
from qkvflow_command import COMMANDS

T = TypeVar("T")

HELP = ("--help", "-h")
USER_ERROR, FAILURE, TERMINATED = 2, 1, 143
UNSEEN = 128 + 13  # what a shell says of a program that SIGPIPE has ended


def run_program(main: Callable[[T], Any], config_class: type[T], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main(config)` as a program and ends the process.

    Exit status: 0; 2 after `error: ...` for a user error; 130 after Ctrl-C; 143 after SIGTERM; the code of a
    `SystemExit` that `main` raises; 1 after a traceback for a bug. If the reader of standard output is gone (`| head`),
    it has what it wanted: 0, silently; 141 if the reader of standard error is gone.

    Levanter's data-loader threads sometimes abort the interpreter while it shuts down, after all work is
    saved. So the process leaves by `os._exit`, after everything that has an orderly end has reached it.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    faulthandler.enable(file=os.dup(2))  # a crash in a library is reported on the terminal, not in a log
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without all characters shows the others
    end_process(_status(main, config_class, argv))


def conclude(text: str, exit_status: int) -> None:
    """The final output of a program; one that was stopped then exits with its status.

    Raises:
        SystemExit: if the status is not 0.
    """
    sys.stdout.write(text)
    sys.stdout.flush()
    if exit_status:
        raise SystemExit(exit_status)


def end_process(status: int) -> NoReturn:
    """Flushes, waits for threads that still write, leaves multi-process JAX, and exits with `status`."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    jax = sys.modules.get("jax")
    if jax is not None and status in (0, TERMINATED) and jax.distributed.is_initialized():
        # All processes of a run finish or stop together; after a failure the call might wait for ever.
        jax.distributed.shutdown()
    logging.shutdown()
    remove_scratch()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may have gone
            stream.flush()
    os._exit(status)


def _status(main: Callable[[T], Any], config_class: type[T], argv: Sequence[str]) -> int:
    try:
        imports_end()
        if any(word in HELP for word in argv):
            sys.stdout.write(_help(main, config_class, argv))
        else:
            with notices_on(sys.stderr):
                config, _ = parse(config_class, argv)
                main(config)
        sys.stdout.flush()  # here, where it is told if that fails
        return 0
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write(MESSAGE)
        return STATUS
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        sys.stderr.write(f"{leave.code}\n")
        return FAILURE
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone(2):
            return UNSEEN
        if isinstance(error, BrokenPipeError) and _reader_has_gone(1):
            return 0
        told = _output_is_refused() if isinstance(error, OSError) else _what_is_short(error)
        if told is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"error: {told}\n")
        return FAILURE


def _output_is_refused() -> str | None:
    """What to tell if standard output takes no more, not even the end of a line."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return None
    except OSError as error:
        return f"standard output cannot be written: {error.strerror}"
    return None


def _what_is_short(error: BaseException) -> str | None:
    """What to tell if Python or XLA found no memory, or TensorStore, which says it in the same words, no space on a
    disk. C++ libraries may abort instead, which nothing can catch."""
    if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
        return None
    said = next(iter(str(error).splitlines()), "")
    detail = f" ({shortened(said, 200)})" if said else ""
    if says_disk_is_full(error):
        return f"a disk is full{detail}. Free some space"
    return (
        f"there is not enough memory{detail}. Use smaller batches, shorter"
        " sequences, a smaller model (`qkvflow describe` reports what it needs), or a machine with more memory"
    )


def _reader_has_gone(stream: int) -> bool:
    """Whether standard output (1) or error (2) is a pipe that nobody reads; if another one breaks, that is a fault."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _terminate(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _help(main: Callable, config_class: type, argv: Sequence[str]) -> str:
    """`--help`: what the program does, and its keys; `--help KEY`: the keys below one."""
    asked = argv[next(i for i, word in enumerate(argv) if word in HELP) + 1 :][:1]
    if asked and not asked[0].startswith("-"):
        return sections(config_class, asked[0])
    module = _module_name(main)
    command = next((f"qkvflow {name}" for name, it in COMMANDS.items() if it.module == module), f"python -m {module}")
    about = (getdoc(sys.modules[main.__module__]) or "").strip()
    return f"""{about}

usage: {command} [--config_path FILE.yaml] [--key.subkey VALUE ...]

Keys, and their defaults in brackets ({{...}} has keys of its own, which `--help KEY` lists):
{key_table(config_class)}

Flags override the same keys of the YAML file. Text values are taken as typed, all others as YAML: 3, 1e-3, true, null,
[a, b] or a,b, {{a: 1}}; @FILE.yaml inserts the contents of a file.
"""


def _module_name(main: Callable) -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if main.__module__ == "__main__" and spec is not None else main.__module__
