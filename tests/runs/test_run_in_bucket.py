"""Runs in a bucket (on an S3 server of this machine): trained, continued, read, fine-tuned, locked as on a disk."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.bucket import bucket
from support.training import Training, losses, parameters

from qkvflow import eval_lm, finetune_lm
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.locks import Taken
from qkvflow.places import Place
from qkvflow.runs import TrainConfig, bucket_lock, prepare_run
from qkvflow.runs.bucket_lock import held
from qkvflow.runs.config import FinetuneConfig
from qkvflow.runs.directory import location_of
from qkvflow.runs.load import find_run
from qkvflow.runs.mirror import Mirror
from qkvflow.training.stopping import StopRequest

pytestmark = pytest.mark.program
FLOW = {
    "type": "neuralode",
    "hidden_dim": 16,
    "max_seq_len": 32,
    "block": {"type": "gpt2", "num_heads": 2},
    "weights": {"type": "constant"},
    "depth": {"solver": "euler", "steps": 2},
}


@pytest.fixture(scope="module")
def store():
    with bucket("store") as url:
        yield Place.of(url)


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Training:
    return Training(tmp_path_factory.mktemp("bucket"))


def stopped_after(monkeypatch, steps: int):
    """From now on training is stopped after so many steps, as by SIGTERM."""
    asked = iter(range(steps + 1))

    def is_due(self: StopRequest) -> bool:
        if next(asked, None) == steps:
            self.signal = signal.SIGTERM
        return self.signal is not None

    monkeypatch.setattr(StopRequest, "is_due", is_due)


@pytest.fixture(scope="module")
def trained(store, training) -> tuple[Place, dict]:
    """A flow in the bucket, stopped after three steps and continued; and the files it had when it was stopped."""
    url = str(store / "runs")
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 3)
        with pytest.raises(SystemExit) as left:
            training.run("a", model=FLOW, run_dir=url)
    assert left.value.code == 143
    run = store / "runs" / "a"
    before = run.files()
    assert training.run("a", model=FLOW, run_dir=url) == run
    return run, before


@pytest.mark.slow
def test_a_run_in_a_bucket_is_continued_bit_for_bit(trained, training):
    run, before = trained
    assert {"config.yaml", "data.json", "metrics.jsonl", "train.log", "checkpoints/step-2/metadata.json"} <= set(before)
    after = run.files()
    assert "checkpoints/step-7/checksums.json" in after
    assert sum(name.startswith("tensorboard/") for name in after) == 2, "one of each start"
    assert ".lock" not in after
    whole = training.run("whole", model=FLOW)
    here = find_run(str(run))
    assert losses(here.path) == losses(whole)
    for got, want in zip(parameters(run), parameters(whole), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_finished_run_in_a_bucket_is_not_run_again(trained, training, store):
    with pytest.raises(UserError, match=r"the run s3://store/runs/a is finished"):
        training.run("a", model=FLOW, run_dir=str(store / "runs"))


@pytest.mark.slow
def test_what_reads_a_run_reads_it_in_a_bucket(trained, capsys):
    run, _ = trained
    eval_lm.main(eval_lm.EvalConfig(run=str(run), steps="1,2", max_eval_batches=1))
    assert f"Written to {run}/evaluation" in capsys.readouterr().out
    assert len(json.loads(run.read("evaluation/depth.json"))["readings"]) == 2


@pytest.mark.slow
def test_a_training_begins_from_a_checkpoint_in_a_bucket(trained, training):
    run, _ = trained
    begun = training.run("begun", 10, model=FLOW, initialize_from=str(run / "checkpoints"))
    assert sorted(losses(begun)) == [8, 9]


@pytest.mark.slow
def test_lora_on_a_run_in_a_bucket_is_merged_there(trained, training, store):
    run, _ = trained
    raw = training.raw("lora", 2, run_dir=str(store / "runs"))
    raw = {key: value for key, value in raw.items() if key != "model"}
    mode = {"type": "lora", "r": 2, "alpha": 2}
    config = decode(FinetuneConfig, raw | {"run": str(run), "mode": mode, "merge": True})
    merged = finetune_lm.main(config)
    assert merged == store / "runs" / "lora-merged"
    base = json.loads((store / "runs" / "lora").read("base.json"))
    assert (base["path"], base["relative"]) == (str(run), "../a")
    for got, want in zip(parameters(merged), parameters(store / "runs" / "lora"), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nowhere/runs", "there is no bucket s3://nowhere"),
        ("s3://", "nor a bucket"),
        ("hdfs://store/runs", "nor a bucket"),
        ("s3://store/listed/nobody", "there is no run .*runs in s3://store/listed: s3://store/listed/a"),
        ("s3://store/listed", "is not a run directory: .*runs in it: s3://store/listed/a"),
    ],
)
def test_what_is_not_in_a_bucket_is_told(store, url, words):
    (store / "listed" / "a").write("config.yaml", b"")
    with pytest.raises(UserError, match=words):
        find_run(url)


@pytest.mark.parametrize("fails", [True, False])
def test_a_start_without_a_step_gives_way_in_a_bucket(store, training, fails):
    config = decode(TrainConfig, training.raw("unbegun", 2, model=FLOW, run_dir=str(store / f"fails-{fails}")))
    with prepare_run(config) as run:
        run.config = dataclasses.replace(run.config, vocab_size=257)
        for name in ("base.json", "tokenizer/tokenizer.json"):
            (run.directory.path / name).parent.mkdir(exist_ok=True)
            (run.directory.path / name).write_text("earlier")
        run.commit()
    place = run.directory.place
    before = {name: place.read(name) for name in place.files() if name != ".lock"}

    def start():
        with prepare_run(config) as again:
            assert not again.directory.base.exists()
            assert not again.directory.tokenizer.exists()
            if fails:
                raise UserError("there is no file for data.train")
            again.commit()

    if fails:
        with pytest.raises(UserError, match="no file"):
            start()
        assert {name: place.read(name) for name in place.files()} == before
    else:
        start()
        assert [*place.files()] == ["config.yaml"]


def test_missing_credentials_and_packages_are_told_before_work(store, training, monkeypatch):
    import fsspec

    s3 = fsspec.get_filesystem_class("s3")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3.clear_instance_cache()
        with pytest.raises(UserError, match=r"refuses this user: .*AWS_ACCESS_KEY_ID"):
            training.run("refused", run_dir=str(store / "runs"))
        s3.clear_instance_cache()
    with monkeypatch.context() as patch:
        patch.setattr(fsspec, "filesystem", lambda *args, **options: (_ for _ in ()).throw(ImportError("Install s3fs")))
        with pytest.raises(UserError, match="pip install s3fs"):
            location_of(str(store))


def test_a_mirror_copies_what_has_changed_and_leaves_checkpoints_alone(store, tmp_path):
    place = store / "mirrored"
    place.write("config.yaml", b"old")
    (place / "checkpoints" / "step-1").write("data", b"large")
    mirror = Mirror(place, tmp_path)
    mirror.pull()
    assert [path.name for path in tmp_path.rglob("*")] == ["config.yaml"]
    (tmp_path / "config.yaml").write_text("newer")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "a.json").write_text("a")
    mirror.push()
    assert (place.read("config.yaml"), (place / "tokenizer").read("a.json")) == (b"newer", b"a")
    place.write("config.yaml", b"by another")
    mirror.push()
    assert place.read("config.yaml") == b"by another", "what has not changed here is not copied again"


@pytest.fixture
def soon(monkeypatch):
    """Locks beat ten times a second, and are left after a second."""
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(bucket_lock, "PATIENCE_SECONDS", 2.0)


def test_one_process_at_a_time_holds_a_lock_in_a_bucket(store, soon):
    place = store / "locked"
    with held(place, "lock"):
        with pytest.raises(Taken, match=socket.gethostname()), held(place, "lock"):
            pass
        assert place.has("lock")
    assert place.names() == []


def test_a_lock_that_a_killed_process_left_is_taken_over(store, soon):
    place = store / "left"
    place.write("lock", json.dumps({"token": "of another", "process": 1, "host": "gone"}).encode())
    begin = time.monotonic()
    with held(place, "lock") as lock:
        assert time.monotonic() - begin >= bucket_lock.PATIENCE_SECONDS
        lock.check()


def test_who_has_lost_its_lock_says_so_and_leaves_that_of_the_other(store, soon):
    place = store / "lost"
    with held(place, "lock") as lock:
        place.write("lock", json.dumps({"token": "of another", "process": 7, "host": "elsewhere"}).encode())
        time.sleep(20 * bucket_lock.BEAT_SECONDS)
        with pytest.raises(UserError, match=r"another process \(number 7 on elsewhere\) has taken over the run"):
            lock.check()
    assert place.has("lock")


@pytest.mark.slow
def test_two_processes_that_are_killed_and_started_again_end_as_one_on_a_disk(store, training):
    """By the program: the second start waits until nobody renews the lock of the first."""
    raw = training.raw("pair", 40, run_dir=str(store / "runs"), checkpointer={"keep": [{"every": 5}]})
    raw["trainer"]["train_batch_size"] = 4
    file = training.base / "pair.yaml"
    file.write_text(yaml.safe_dump(raw))
    first = start_pair(file)
    run = store / "runs" / "pair"
    deadline = time.monotonic() + 600
    while not run.has("checkpoints/step-5/metadata.json") and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in first:
        process.kill()
        process.wait()
    assert run.has(".lock")
    errors = finished(start_pair(file))
    assert "continues after step" in errors[0]
    raw["run_dir"] = str(training.base / "runs")
    file.write_text(yaml.safe_dump(raw))
    finished(start_pair(file))
    assert losses(find_run(run).path) == losses(training.path("pair"))
    for got, want in zip(parameters(run), parameters(training.path("pair")), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {"train.log", "train.1.log"} <= set(run.names())


def start_pair(file: Path) -> list[subprocess.Popen]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    words = [sys.executable, "-m", "qkvflow.train_lm", "--config_path", str(file)]
    words += ["--trainer.distributed.coordinator_address", address, "--trainer.distributed.num_processes", "2"]
    each = ([*words, "--trainer.distributed.process_id", str(index)] for index in range(2))
    return [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in each]


def finished(processes: list[subprocess.Popen]) -> list[str]:
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return errors
