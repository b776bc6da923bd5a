"""Data files that change: under a run they do not matter; a run that continues on other data is refused, or says so."""

import json
import os
import platform
import threading

import pytest
from support.training import assert_same, losses, wait_until

from qkvflow.data.config import DataConfig
from qkvflow.errors import UserError
from qkvflow.runs import data_record
from qkvflow.runs.checkpoints import checkpoint_steps

program = [pytest.mark.slow, pytest.mark.program]
TEXT = "the for statement is used to iterate over the elements of a sequence\n" * 60


def _record(tmp_path, **keys):
    return dict(DataConfig(cache_dir=str(tmp_path / "cache"), **keys).resolve(tmp_path / "tokenizer").record)


def test_the_record_of_the_data_follows_its_content_not_its_place_or_time(tmp_path):
    (tmp_path / "a").mkdir()
    one, two = tmp_path / "a" / "1.txt", tmp_path / "a" / "2.jsonl"
    one.write_text(TEXT)
    two.write_text('{"text": "word"}\n' * 100)
    keys = {"train": [str(one), str(two)]}
    record = _record(tmp_path, **keys)
    assert list(record) == [str(one), str(two)]
    os.utime(one)
    assert _record(tmp_path, **keys) == record
    data_record.write(tmp_path / "data.json", record)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = _record(tmp_path, train=[str(tmp_path / "b" / "1.txt"), str(tmp_path / "b" / "2.jsonl")])
    assert list(moved.values()) == list(record.values())
    assert data_record.changes(tmp_path / "data.json", moved) == {}
    swapped = _record(tmp_path, train=[str(tmp_path / "b" / "2.jsonl"), str(tmp_path / "b" / "1.txt")])
    assert data_record.changes(tmp_path / "data.json", swapped)
    (tmp_path / "b" / "1.txt").write_text(TEXT.replace("for", "nor"))  # of the same size
    changed = _record(tmp_path, train=[str(tmp_path / "b" / "1.txt"), str(tmp_path / "b" / "2.jsonl")])
    data_record.write(tmp_path / "data.json", moved)
    assert list(data_record.changes(tmp_path / "data.json", changed)) == [str(tmp_path / "b" / "1.txt")]
    python = platform.python_version()
    assert list(_record(tmp_path)) == [f"the built-in text of 'builtin' (topics, Python {python})"]


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "data.json").write_text('{"a')
    with pytest.raises(UserError, match=r"data\.json cannot be read"):
        data_record.changes(tmp_path / "data.json", {})


def test_many_changes_are_told_in_few_lines(tmp_path):
    changes = {f"{number}.txt": ("a", None) for number in range(100)}
    text = str(data_record.refusal(tmp_path, changes))
    assert "4.txt: gone" in text
    assert "and 95 more" in text
    assert "50.txt" not in text


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(TEXT)
    (folder / "validation.txt").write_text(TEXT[:3000])
    return folder


def _data(training, files):
    return {
        "cache_dir": str(training.base / "cache"),
        "train": str(files / "train.txt"),
        "validation": str(files / "validation.txt"),
    }


@pytest.fixture(scope="module")
def disturbed(training, files):
    """A run during which its file was overwritten, and an undisturbed run on the same text."""
    data = _data(training, files)
    whole = training.run("text-whole", data=data)
    metrics = training.path("text-changed") / "metrics.jsonl"

    def overwrite():
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size)
        (files / "train.txt").write_text("other text\n" * 400)

    thread = threading.Thread(target=overwrite)
    thread.start()
    changed = training.run("text-changed", data=data)
    thread.join()
    return changed, whole


@pytest.mark.slow
@pytest.mark.program
def test_a_file_that_changes_while_the_run_goes_on_does_not_matter(files, disturbed):
    last = disturbed[0] / "checkpoints" / "step-7" / "metadata.json"
    assert (files / "train.txt").stat().st_mtime_ns < last.stat().st_mtime_ns
    assert_same(*disturbed)


@pytest.mark.slow
@pytest.mark.program
def test_a_run_on_changed_data_is_refused_and_can_be_accepted(training, files, disturbed):
    changed, whole = disturbed
    data, longer = _data(training, files), {"accept_changes": True}
    before = {path: path.read_bytes() for path in changed.rglob("*") if path.is_file() and path.name != ".lock"}
    (changed / "checkpoints" / "step-7").rename(training.base / "step-7")  # so that the run is not finished
    words = rf"(?s)data of the run .* has changed.*{files / 'train.txt'}: it was \d+ bytes.*accept"
    with pytest.raises(UserError, match=words):
        training.run("text-changed", data=data)
    (training.base / "step-7").rename(changed / "checkpoints" / "step-7")
    after = {path: path.read_bytes() for path in before}
    assert {path for path in before if before[path] != after[path]} <= {changed / "train.log"}
    (changed / "checkpoints" / "step-7").rename(training.base / "step-7")
    training.run("text-changed", data=data, **longer)
    notes = [json.loads(line) for line in (changed / "changes.jsonl").read_text().splitlines()]
    (name,) = notes[-1]["changed"]
    assert name == f"data: {files / 'train.txt'}"
    assert notes[-1]["after_step"] == 6
    assert losses(changed)[7] != losses(whole)[7]
    assert losses(changed)[6] == losses(whole)[6]
    # It is the run's data now.
    (changed / "checkpoints" / "step-7").rename(training.base / "again-7")
    training.run("text-changed", data=data)
    assert checkpoint_steps(changed / "checkpoints")[-1] == 7


@pytest.mark.slow
@pytest.mark.program
def test_a_run_without_a_record_continues_and_gets_one(training, files, disturbed):
    whole, data = disturbed[1], _data(training, files)
    (whole / "data.json").unlink()
    (whole / "checkpoints" / "step-7").rename(training.base / "whole-7")
    training.run("text-whole", data=data)
    assert str(files / "train.txt") in (whole / "data.json").read_text()
