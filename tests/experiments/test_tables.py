"""One record of a table, printed three ways."""

import csv
import math
import re

from experiments.cost import Cost
from experiments.lines import against, known, lines, table
from experiments.records import Training
from experiments.tables import Table, contrast_numbers, in_latex, latex, number

LOSSES = {"a": (2.0, 2.2, 2.4), "b_c": (2.1, 2.3, 2.51)}
TRAINED = {
    name: [Training(seed, 0.5, [(5, 3.0), (10, own)], report_loss=own) for seed, own in enumerate(each)]
    for name, each in LOSSES.items()
}
LINES = lines(TRAINED, "a", {name: Cost(2_000_000, 1, 1, 1.5, 1) for name in LOSSES}, dict.fromkeys(LOSSES, 10))
LOSSES = {name: line.loss for name, line in LINES.items()}
TABLE = table("arm", LINES, against("a"))


def test_markdown_has_a_row_for_each_line():
    head, rule, *rows = str(TABLE).splitlines()
    assert head == "| arm | loss | SD | minus a | p (Holm) | d_z |"
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    assert rows[0] == "| a | 2.200 ± 0.497 | 0.200 |  |  |  |"
    assert rows[1].startswith("| b_c | 2.303 ± 0.509 | 0.205 | 0.103 ± 0.014 | 0.001 |")
    assert str(Table(["x", "y"], [[None, 1]], rule="---")) == "| x | y |\n|---|---|\n| | 1 |"


def test_columns_are_named_and_a_line_knows_where_it_is():
    shown = table("arm", LINES, known("trained", "FLOPs", "rate"), against("a"), {"own": lambda line: line.steps + 1})
    assert shown.head[:4] == ["arm", "trained", "FLOPs", "rate"]
    assert shown.rows[0][:4] == ["a", "2.00M", "15", "0.5"]
    assert [row[-1] for row in shown.rows] == [11, 11]
    assert [(step, r.seed) for step, r in LINES["b_c"].reaches(2.3)] == [(10, 0), (10, 1)]


def test_latex_takes_no_mark_for_a_command():
    text = latex({in_latex("5% of a_b"): TABLE, "again": TABLE})
    assert r"b\_c & 2.303 $\pm$ 0.509" in text
    assert r"\multicolumn{6}{l}{5\% of a\_b} \\" in text
    assert text.count(" & ") == 5 * (1 + 2 * 2)
    assert re.search(r"(?<!\\)[%#_]", text) is None, "LaTeX takes it for a comment, or worse"
    assert text.count("{") == text.count("}")


def test_csv_has_all_digits_and_a_column_for_each_number():
    lines = [{"arm": name, "curve": [1, 2], **contrast_numbers(loss)} for name, loss in LOSSES.items()]
    first, second = csv.DictReader(Table.of(lines).csv().splitlines())
    assert "curve" not in first
    assert list(first)[:6] == ["arm", "n", "loss", "sd", "low", "high"]
    assert first["difference"] == ""
    assert float(second["difference"]) == LOSSES["b_c"].difference.mean
    assert float(second["low"]) == LOSSES["b_c"].mean.bounds[0]


def test_numbers_that_are_not_there():
    assert [number(None), number(math.nan), number(0.012345)] == ["", "-", "0.012"]
