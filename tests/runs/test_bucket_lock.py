"""The lock of a run in a bucket, where its steps interleave badly; on a bucket: test_run_in_bucket.py."""

import threading
import time

from qkvflow.locks import Taken
from qkvflow.places import Place
from qkvflow.runs import bucket_lock
from qkvflow.runs.bucket_lock import BucketLock


def test_of_two_that_take_over_what_was_left_one_gets_it(tmp_path, monkeypatch):
    """The second removes the lock that the first has just made, instead of the one that was left."""
    monkeypatch.setattr(bucket_lock, "PATIENCE_SECONDS", 1.0)
    place = Place.of(str(tmp_path))
    place.write("lock", b'{"token": "of a killed process"}')
    waited, created, replaced = threading.Barrier(2), threading.Event(), threading.Event()
    remove, create, rest = place.remove, place.create, time.sleep
    found: dict[str, BucketLock | Taken] = {}

    def is_second():
        return threading.current_thread().name == "second"

    def late(name):
        if threading.current_thread() in threads:
            waited.wait(10)
        if is_second():
            assert created.wait(10)
        remove(name)

    def told(name, content):
        create(name, content)
        (replaced if is_second() else created).set()

    def sleep(seconds):
        rest(seconds)
        if created.is_set() and not is_second():  # before it looks whether the lock is still its own
            assert replaced.wait(10)

    monkeypatch.setattr(Place, "remove", lambda self, name=None: late(name))
    monkeypatch.setattr(Place, "create", lambda self, name, content: told(name, content))
    monkeypatch.setattr(bucket_lock.time, "sleep", sleep)

    def take():
        lock = BucketLock(place, "lock")
        try:
            lock.take(lambda: None)
            found[threading.current_thread().name] = lock
        except Taken as taken:
            found[threading.current_thread().name] = taken

    threads = [threading.Thread(target=take, name=name) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(found["first"], Taken)
    assert isinstance(found["second"], BucketLock)
    found["second"].release()
    assert not place.has("lock")


def test_a_store_that_fails_at_the_end_does_not_fail_the_run(tmp_path, monkeypatch):
    """The lock stays behind, and others take it when its beat has been missing for long enough."""
    place = Place.of(str(tmp_path))
    lock = BucketLock(place, "lock")
    lock.take(lambda: None)

    def fail(self, name):
        raise RuntimeError("503 from the store")  # stores have errors of their own

    monkeypatch.setattr(Place, "read", fail)
    lock.release()
