"""Results of experiments: made once and kept, read again by --redraw, and shown; those that are committed."""

import json
import re
from pathlib import Path

import pytest

from experiments.ablations.tables import markdown as ablations
from experiments.adaptive_depth.report import table as adaptive_depth
from experiments.compare.tables import markdown as compare
from experiments.gradient_flow.tables import markdown as gradient_flow
from experiments.leak.page import markdown as leak
from experiments.results import kept_in, show
from experiments.steering.report import markdown as steering
from qkvflow.errors import UserError

ROOT = Path(__file__).parents[2]
NUMBER = r"\d+\.\d{2,}"


def test_made_kept_and_read_again(tmp_path):
    output = tmp_path / "new" / "results"
    with pytest.raises(UserError, match="there are no results"):
        kept_in(output, None)
    assert not output.exists()
    made = kept_in(output, lambda: {"pair": (1, 2.5)})
    assert made == kept_in(output, None) == {"pair": [1, 2.5]}
    assert kept_in(output, lambda: {"other": 1}, json.dumps) == {"other": 1}
    assert (output / "results.json").read_text() == '{"other": 1}'


def test_what_is_shown_is_what_is_written(tmp_path, capsys):
    show("# Page", tmp_path, "page.md")
    assert (tmp_path / "page.md").read_text() == "# Page"
    assert capsys.readouterr().out == f"# Page\nWritten to {tmp_path}\n"


COMMITTED = {
    "ablations": (ablations, "results.md"),
    "adaptive_depth": (adaptive_depth, "table.md"),
    "compare": (compare, "results.md"),
    "gradient_flow": (gradient_flow, "results.md"),
    "leak": (leak, "results.md"),
    "steering": (steering, "results.md"),
}


# A study may have been run in other sizes too: results_<what>/.
FOLDERS = [folder for name in COMMITTED for folder in sorted((ROOT / "experiments" / name).glob("results*"))]


def committed(folder: Path) -> str:
    return (folder / COMMITTED[folder.parent.name][1]).read_text()


def test_all_studies_have_results():
    assert {folder.parent.name for folder in FOLDERS if folder.name == "results"} == set(COMMITTED)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_committed_pages_come_from_their_json(folder):
    record = json.loads((folder / "results.json").read_text())
    assert COMMITTED[folder.parent.name][0](record).strip() == committed(folder).strip()


def test_what_the_documentation_says_stands_in_the_results():
    """Rows of tables word for word; in prose, numbers with at least two decimals."""
    pages = "\n".join(map(committed, FOLDERS))
    rows, numbers = set(pages.splitlines()), set(re.findall(NUMBER, pages))
    page = (ROOT / "docs" / "results.md").read_text()
    said = page + (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    assert said != page, "README has no results"
    assert [line for line in said.splitlines() if line.startswith("|") and line not in rows] == []
    assert sorted(set(re.findall(NUMBER, said)) - numbers) == []
