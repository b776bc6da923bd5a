"""The frame of studies: its command line; results that are made once and drawn again; those that are committed."""

import csv
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.studies import ROOT

from experiments.config import OutputConfig, SeedsConfig
from experiments.records import Record, Training, kept, read, written
from experiments.study import Study, filled
from experiments.tables import Table
from qkvflow.cli import parse
from qkvflow.errors import UserError

TABLE = r"(?:^\|.*\n)+"
NUMBER = r"\d+\.\d{2,}"
NAMES = (
    "ablations",
    "adaptive_depth",
    "compare",
    "continuity",
    "dynamics",
    "gradient_flow",
    "leak",
    "lift",
    "steering",
)
STUDIES: dict[str, Study] = {n: importlib.import_module(f"experiments.{n}.__main__").STUDY for n in NAMES}
# A study may have been run in other sizes too: results_<what>/.
FOLDERS = [folder for name in NAMES for folder in sorted((ROOT / "experiments" / name).glob("results*"))]


@dataclass(frozen=True, kw_only=True)
class Pair(Record):
    pair: tuple[int, float]
    results: list[Training]


def test_a_record_is_the_same_again_and_may_be_older_than_the_code():
    pair = Pair(pair=(1, 2.5), results=[Training(3, curve=[(1, 2.0)]), Training(4, report_loss=0.1)])
    text = written(pair)
    assert len(text.splitlines()) > 4
    assert read(Pair, json.loads(text)) == pair
    older = {"pair": [1, 2.5], "results": [{"seed": 3, "curve": [[1, 2.0]], "system": "a"}], "jax": "0"}
    assert read(Pair, older) == Pair(pair=(1, 2.5), results=[Training(3, curve=[(1, 2.0)])])
    with pytest.raises(ValueError, match="pair"):
        read(Pair, {"results": []})


def test_what_is_kept_is_made_again_only_if_it_is_asked_for_something_else(tmp_path):
    made = []

    def make() -> Training:
        made.append(len(made))
        return Training(len(made), curve=[(1, 0.1 + 0.2)])

    for asked in ({"a": (1, 2)}, {"a": [1, 2]}, {"a": 3}, {"a": 3}):
        found = kept(tmp_path / "new" / "one.json", Training, asked, make)
    assert made == [0, 1]
    assert found == Training(2, curve=[(1, 0.1 + 0.2)])


def test_made_drawn_and_drawn_again(tmp_path, capsys, monkeypatch):
    """What is shown is what is written; without results there is nothing to draw."""
    monkeypatch.setattr("experiments.study.FOLDER", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "page.md").write_text("# {title}: {record.pair[1]:.2f} ({level:.0%})\n{record.origin}\n")
    record = Pair(pair=(1, 2.5), results=[])
    tables = {"a.csv": Table(["x"], [[1]])}
    study = Study("mine", OutputConfig, Pair, lambda *_: record, lambda _: {"title": "Mine"}, lambda _: tables)
    config = OutputConfig(run_dir=str(tmp_path / "runs"))
    with pytest.raises(UserError, match=r"there are no results .* --output"):
        study.carry_out(OutputConfig(run_dir=str(tmp_path / "runs"), redraw=True))
    assert not (tmp_path / "runs").exists()
    made = study.carry_out(config)
    output = tmp_path / "runs" / "results"
    shown = capsys.readouterr().out
    assert shown == f"{(output / 'results.md').read_text()}\nWritten to {output}\n"
    assert shown.startswith("# Mine: 2.50 (95%)\n")
    assert "Command: `python -m experiments.mine" in shown
    assert (output / "a.csv").read_text() == "x\n1\n"
    files = {path.name: path.read_bytes() for path in output.iterdir()}
    assert study.carry_out(OutputConfig(run_dir=str(tmp_path / "runs"), redraw=True)) == made
    assert {path.name: path.read_bytes() for path in output.iterdir()} == files


@pytest.mark.parametrize("content", ['{"pair": [1, ', '{"losses": []}', "[]", "\xff"])
def test_what_is_no_result_of_the_study_is_not_redrawn(content, tmp_path):
    (tmp_path / "results.json").write_bytes(content.encode("latin1"))
    study = Study("mine", OutputConfig, Pair, lambda *_: pytest.fail("made"), lambda _: {})
    with pytest.raises(UserError, match=r"results\.json is not the results of experiments\.mine, .* without --redraw"):
        study.carry_out(OutputConfig(output=str(tmp_path), redraw=True))


@pytest.mark.parametrize("key", ["run_dir", "output"])
def test_a_folder_that_is_a_file_is_refused_before_any_work(key, tmp_path):
    (tmp_path / "file").touch()
    study = Study("mine", OutputConfig, Pair, lambda *_: pytest.fail("made"), lambda _: {})
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=rf"file is a file, .* `{key}`. Choose another by --{key}"):
            study.carry_out(OutputConfig(**{"run_dir": str(tmp_path), key: str(path)}))


def test_a_line_of_a_page_without_its_value_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.study.FOLDER", tmp_path)
    (tmp_path / "page.md").write_text(
        "# {n:d}\n\n## Times{times:if}\n\nIn {unit}.{times:if}\n\n{times}\n\nEnd\n\n{last}\n"
    )
    values = {"n": 3, "times": "1, 2", "unit": "s", "last": None}
    assert filled("page.md", values) == "# 3\n\n## Times\n\nIn s.\n\n1, 2\n\nEnd\n"
    assert filled("page.md", values | {"times": None}) == "# 3\n\nEnd\n"
    with pytest.raises(KeyError, match="times"):
        filled("page.md", {"n": 3})


def test_lists_are_given_as_people_write_them():
    study, words = STUDIES["gradient_flow"], ["--smoke", "--steps=2,4", "--solvers", "euler", "--seeds", "[3, 4]"]
    config = parse(study.config, study.arguments(words))[0]
    assert (config.steps, config.solvers, config.seeds) == ([2, 4], ["euler"], [3, 4])
    assert Path(config.config_path).name == "smoke.yaml"
    assert study.arguments(["--config", "mine.yaml"]) == ["--config", "mine.yaml"]
    assert STUDIES["compare"].arguments(["--redraw"]) == ["--redraw"]
    ablations = parse(STUDIES["ablations"].config, ["--only", "a,b", "--run_dir", "c,d"])[0]
    assert (ablations.only, ablations.run_dir) == (["a", "b"], "c,d")
    assert parse(STUDIES["ablations"].config, ["--only", "null"])[0].only is None
    panels = ["--panels", '{"one": ["basis_2"]}', "--panels.two", "basis_4,basis_8"]
    continuity = parse(STUDIES["continuity"].config, panels)[0]
    assert continuity.panels == {"one": ["basis_2"], "two": ["basis_4", "basis_8"]}
    with pytest.raises(UserError, match=r"seeds\[0\].* must be an integer, but is 'x'"):
        parse(study.config, study.arguments(["--seeds", "x"]))


def test_seeds_are_enough_for_an_interval():
    for seeds in ([1], [1, 1]):
        with pytest.raises(UserError, match="at least two different"):
            SeedsConfig(config_path="mine.yaml", seeds=seeds).check()
    with pytest.raises(UserError, match="`evaluations` must be at least 1"):
        parse(SeedsConfig, ["--evaluations", "0"])


def committed(folder: Path) -> str:
    return (folder / STUDIES[folder.parent.name].page_name).read_text()


def test_all_studies_have_results():
    """But for one, whose trainings take a day."""
    found = {folder.parent.name for folder in FOLDERS if folder.name == "results"}
    assert found | {"continuity"} == set(NAMES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_committed_pages_and_tables_come_from_their_json(folder):
    study = STUDIES[folder.parent.name]
    record = read(study.record, json.loads((folder / "results.json").read_text()))
    assert study.filled_page(record) == committed(folder)
    files = study.files(record)
    assert set(files) == {path.name for path in folder.iterdir() if path.suffix in (".csv", ".tex")}
    for name, content in files.items():
        assert (content.csv() if isinstance(content, Table) else content) == (folder / name).read_text()
    for name in (name for name in files if name.endswith(".csv")):
        assert len(list(csv.reader((folder / name).open()))) > 1


def _printed(*words: str) -> str:
    """What a new process prints. `experiments` chooses NumPy's instructions before its import, too late in this one."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def test_studies_compute_alike_on_processors_of_many_kinds():
    """NumPy uses no instructions newer than AVX2, which it would choose where they are, and which give other pixels."""
    found = "numpy.show_config(mode='dicts')['SIMD Extensions'].get('found', [])"
    newer = _printed("-c", f"import experiments, numpy; print([n for n in {found} if n[-2:] == 'V4' or '512' in n])")
    assert newer == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_committed_figures_come_from_their_json(folder, tmp_path):
    """Byte for byte, with the pinned matplotlib."""
    (tmp_path / "results.json").write_text((folder / "results.json").read_text())
    _printed("-m", f"experiments.{folder.parent.name}", "--redraw", "--output", str(tmp_path))
    for path in folder.glob("*.png"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in folder.glob("*.png")} == {path.name for path in tmp_path.glob("*.png")}


def test_what_the_documentation_says_stands_in_the_results():
    """Whole tables word for word, but that of the claims; in prose, numbers with at least two decimals."""
    pages = "\n".join(map(committed, FOLDERS))
    tables, numbers = set(re.findall(TABLE, pages, re.MULTILINE)), set(re.findall(NUMBER, pages))
    page = (ROOT / "docs" / "results.md").read_text()
    said = page + (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    assert said != page, "README has no results"
    claims = page.partition("## Claims of the original projects")[2].partition("\n## ")[0]
    assert claims.count("\n|") > 5
    shown = re.findall(TABLE, said.replace(claims, ""), re.MULTILINE)
    assert len(shown) > 20
    assert [table for table in shown if table not in tables] == []
    assert sorted(set(re.findall(NUMBER, said)) - numbers) == []
