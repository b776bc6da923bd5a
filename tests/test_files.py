"""Files that are whole or absent, and paths of users."""

import json
import math
import os
from pathlib import Path

import pytest

from qkvflow.data import DataConfig
from qkvflow.errors import UserError
from qkvflow.files import array_path, is_fresh, json_text, local_path, replacing, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def fail():
        with replacing(path) as fresh:
            fresh.write_text("half")
            assert is_fresh(fresh.name)
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"
    write_text(path, "néw")
    assert path.read_bytes() == "néw".encode()


def test_paths_stand_for_themselves():
    for name in ("runs[1]/a*", "{a,b}", "what?", "a b", "$HOME"):
        assert local_path(name) == Path(name)
    assert local_path("~/x") == Path(os.path.expanduser("~/x"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nobodyknows/x", "no home"),
        ("a/" + "x" * 300, "too long"),
        ("x/" * 3000, "too long"),
        ("a\0b", "zero byte"),
        ("\ud800", "half of"),
    ],
)
def test_paths_that_no_file_can_have_are_refused(name, words):
    with pytest.raises(UserError, match=words) as error:
        local_path(name)
    assert len(str(error.value)) < 300


def test_a_folder_of_arrays_has_a_name_in_utf8(tmp_path, monkeypatch):
    name = os.fsdecode(b"t\xe9l")  # Latin-1
    assert local_path(name) == Path(name)
    with pytest.raises(UserError, match="cannot hold arrays: its name is not UTF-8"):
        array_path(name)
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError, match="is not UTF-8"):
        array_path("runs")
    assert array_path("/tmp/café") == Path("/tmp/café")


def test_a_folder_of_arrays_is_one_path(tmp_path, monkeypatch):
    """fsspec takes `a::b` for two paths, and makes the first one."""
    for name in ("a::b", str(tmp_path / "c::d" / "runs")):
        with pytest.raises(UserError, match="contains `::`"):
            array_path(name)
    config = DataConfig(train="x.txt", cache_dir=str(tmp_path / "a::b"))
    (tmp_path / "x.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="contains `::`"):
        config.resolve(tmp_path / "tokenizer")
    assert not (tmp_path / "a").exists()


def test_json_has_null_for_what_is_not_finite():
    text = json_text({"a": [1.5, math.nan], "b": ({"c": -math.inf},), "d": 2, "e": "NaN"})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [1.5, None], "b": [{"c": None}], "d": 2, "e": "NaN"}
