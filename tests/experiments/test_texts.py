"""Texts of studies: three parts that differ, written once, wherever they come from."""

import json
import os
from pathlib import Path

import pytest

from experiments.texts import PARTS, Builtin, Files, HuggingFace, Shakespeare, WikiText2, write_new
from qkvflow.data.builtin import documents_of
from qkvflow.errors import UserError


def test_texts_are_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    lines = "".join(f"line {i} of a text\n" for i in range(100))
    for name in ("valid.txt", "test.txt", "input.txt"):
        (tmp_path / name).write_text(name + lines)
    wiki, play = (kind(str(tmp_path)).prepare(tmp_path / "texts") for kind in (WikiText2, Shakespeare))
    assert wiki.read("train") == "valid.txt" + lines
    assert wiki.read("select") + wiki.read("report") == "test.txt" + lines
    assert "".join(map(play.read, PARTS)) == "input.txt" + lines
    for text in (wiki, play, Builtin().prepare(tmp_path), Builtin("library").prepare(tmp_path)):
        assert all(text.read(part).endswith("\n") for part in ("select", "report"))
        assert len({text.hash(part) for part in PARTS}) == 3


def test_no_file_of_the_library_is_in_two_parts():
    files, parts = list(documents_of("library", "validation")), Builtin("library").contents()
    assert "\n".join(parts[1:]) == "\n".join(files)
    assert [sum(file in part for part in parts[1:]) for file in files if len(file) > 2000] == [1] * sum(
        len(file) > 2000 for file in files
    )
    assert len(parts[1]) == pytest.approx(len(parts[2]), rel=0.1)


def test_text_is_written_once(tmp_path):
    for name in PARTS:
        (tmp_path / name).write_text(f"{name}\n")
    config = Files("mine", *(str(tmp_path / name) for name in PARTS))
    text = config.prepare(tmp_path / "texts")
    before = os.stat(text.file("train")).st_mtime_ns
    config.prepare(tmp_path / "texts")
    assert os.stat(text.file("train")).st_mtime_ns == before
    assert text.sizes() == {"train": 6, "select": 7, "report": 7}


def test_another_text_does_not_take_the_place_of_one_that_trainings_read(tmp_path):
    """Also with line ends of Windows, which are kept: all bytes count."""
    for name in PARTS:
        (tmp_path / name).write_text(f"{name}\n")
    config = Files("mine", *(str(tmp_path / name) for name in PARTS))
    text = config.prepare(tmp_path / "texts")
    before = {part: text.read(part) for part in PARTS}
    (tmp_path / "report").write_text("other\n")
    with pytest.raises(UserError, match=r"another text of the name 'mine'.*Nothing was changed"):
        config.prepare(tmp_path / "texts")
    assert {part: text.read(part) for part in PARTS} == before
    path = Path(write_new(tmp_path / "windows.txt", "a\r\nb"))
    changed = os.stat(path).st_mtime_ns
    assert write_new(path, "a\r\nb") == str(path)
    assert os.stat(path).st_mtime_ns == changed


def test_what_is_not_there_or_the_same_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read: .*--text\.folder DIR"):
        WikiText2(str(tmp_path)).prepare(tmp_path)
    for name in PARTS:
        (tmp_path / name).write_text("the same\n")
    with pytest.raises(UserError, match=r"must differ, but two of .*train, .*select and .*report"):
        Files("mine", *(str(tmp_path / name) for name in PARTS)).prepare(tmp_path)


def test_a_data_set_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    """A folder that `datasets` reads stands for the hub."""
    source = tmp_path / "some_set"
    source.mkdir()
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"page": f"{split}, page {i}\n"}) for i in range(3)]
        (source / f"{split}.jsonl").write_text("\n".join(lines))
    config = HuggingFace(id=str(source), text_key="page")
    text = config.prepare(tmp_path / "texts")
    for part, split in (("train", "train"), ("select", "validation"), ("report", "test")):
        assert Path(text.file(part)).read_text() == "\n".join(f"{split}, page {i}\n" for i in range(3))
    with pytest.raises(UserError, match=r"no text 'text' \(`text_key`\); keys: page"):
        HuggingFace(id=str(source)).prepare(tmp_path / "others")
    with pytest.raises(UserError, match="must differ, but two of split train of"):
        HuggingFace(id=str(source), text_key="page", select="train").prepare(tmp_path / "others")
    monkeypatch.setattr(HuggingFace, "_fetch", lambda *_: pytest.fail("fetched again"))
    assert config.prepare(tmp_path / "texts").sizes() == text.sizes()
