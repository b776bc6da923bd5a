"""Results of experiments: made once and kept, read again by --redraw, and shown."""

import json

import pytest

from experiments.results import kept_in, show
from qkvflow.errors import UserError


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
