"""Locks: one holder, named; gone with its holder however that ends, whatever children it has left behind."""

import os
import subprocess
import sys
import threading

import pytest

from qkvflow.locks import Taken, locked

# Holds the lock with a forked child that outlives it, and ends as it is told.
HOLDER = """
import os, sys, time
from pathlib import Path
from qkvflow.locks import locked
with locked(Path(sys.argv[1]), wait=False):
    if os.fork() == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")],
        stdin=pipe,
        stdout=pipe,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_another_process_is_refused_and_hears_who_holds_it(tmp_path, holder):
    with (
        pytest.raises(Taken, match=rf"^another process \(number {holder.pid}\)$"),
        locked(tmp_path / "lock", wait=False),
    ):
        pass


def test_a_killed_holder_leaves_no_lock_though_its_child_lives(tmp_path, holder):
    holder.kill()
    holder.wait()
    with locked(tmp_path / "lock", wait=False):
        pass


def test_this_process_is_another_place_too(tmp_path):
    with (
        locked(tmp_path / "lock", wait=False),
        pytest.raises(Taken, match=r"^this process$"),
        locked(tmp_path / "lock", wait=False),
    ):
        pass
    with locked(tmp_path / "lock", wait=False):
        pass


def test_who_waits_gets_it_next(tmp_path):
    order = []

    def wait():
        with locked(tmp_path / "lock", wait=True):
            order.append("second")

    thread = threading.Thread(target=wait)
    with locked(tmp_path / "lock", wait=False):
        thread.start()
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_a_file_system_without_locks_is_told_in_the_log(tmp_path, monkeypatch, caplog):
    import errno
    import fcntl

    def refuse(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", wait=False), locked(tmp_path / "lock", wait=True):
        pass
    assert "no file locks" in caplog.text
