"""Tables of results: one record of a table, printed as Markdown, LaTeX or CSV; and the format of its numbers."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.statistics import Contrast, Equivalence, Interval

Cell = str | float | Interval | Equivalence | None
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {mark: rf"\{mark}" for mark in "_%&#${}"}


@dataclass(frozen=True)
class Table:
    """head: names of the columns. rows: their cells; None for an empty cell. rule: below a name, in Markdown.

    Attributes:
        formats: column -> how its numbers are shown in Markdown.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    rule: str = " --- "
    formats: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, object]]) -> "Table":
        """One row per mapping, one column per key whose value is a number or a text, in order of first appearance."""
        lines = [{key: value for key, value in line.items() if isinstance(value, str | float | int)} for line in lines]
        head = list(dict.fromkeys(key for line in lines for key in line))
        return Table(head, [[line.get(key) for key in head] for line in lines])

    def __str__(self) -> str:
        """Markdown."""
        shown = [map(self._shown, self.head, row) for row in self.rows]
        lines = ["|".join(" " if cell is None else f" {cell} " for cell in row) for row in (self.head, *shown)]
        return "\n".join(f"|{line}|" for line in [lines[0], "|".join(self.rule for _ in self.head), *lines[1:]])

    def _shown(self, name: str, cell: Cell) -> Cell:
        if name not in self.formats or not isinstance(cell, int | float):
            return cell
        return number(cell, self.formats[name])

    def csv(self) -> str:
        """Numbers with all digits, empty for None; an interval in a column for each of its numbers."""
        rows = [[c.numbers if isinstance(c, Interval | Equivalence) else {"": c} for c in row] for row in self.rows]
        parts = [dict.fromkeys(part for cell in column for part in cell) for column in zip(*rows, strict=True)]
        head = [name + part for name, own in zip(self.head, parts, strict=True) for part in own]
        flat = [[cell.get(part) for cell, own in zip(row, parts, strict=True) for part in own] for row in rows]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *flat])
        return text.getvalue()


def latex(tables: Mapping[str, Table]) -> str:
    """Tables with the same columns as one `tabular` with booktabs rules; the keys, in LaTeX, are titles."""
    head = next(iter(tables.values())).head
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", _latex_row(head)]
    for title, table in tables.items():
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{{title}}} \\", *map(_latex_row, table.rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def in_latex(text: object) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in str(text))


def _latex_row(cells: Sequence[Cell]) -> str:
    return " & ".join(map(in_latex, cells)) + r" \\"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def code(text: str) -> str:
    """As code in Markdown, which may contain `<` and backticks."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[:1] == "`" or text[-1:] == "`" else f"{fence}{text}{fence}"


def number(x: float | None, form: str = ".2g") -> str:
    """In that format, by default two digits; `-` for nan, empty for None."""
    return "" if x is None else "-" if math.isnan(x) else format(x, form)


def count(n: float) -> str:
    """A number of parameters."""
    return f"{n / 1e6:.2f}M" if n >= 1e5 else f"{n / 1e3:.1f}k"


def milliseconds(seconds: Iterable[float]) -> str:
    """Minimum and maximum over seeds, empty without any: no interval, since other work on a machine is not a random
    sample."""
    own = sorted(1000 * each for each in seconds)
    return f"{own[0]:.0f} to {own[-1]:.0f}" if own else ""


def difference_cells(contrast: Contrast) -> list[Cell]:
    """For all but the reference: the difference to it, its p and its effect."""
    against = contrast.difference
    return ["", "", ""] if against is None else [against, number(contrast.p_holm), number(against.effect)]


def contrast_numbers(contrast: Contrast) -> dict[str, float | None]:
    """A mean, and for all but the reference the difference to it and its test, as columns of CSV."""
    mean, against = contrast.mean, contrast.difference
    cells = {"n": mean.n, "loss": mean.mean, "sd": mean.sd, "low": mean.bounds[0], "high": mean.bounds[1]}
    if against is not None:
        low, high = against.bounds
        cells |= {"difference": against.mean, "difference_low": low, "difference_high": high, "t": against.t}
        cells |= {"df": against.df, "p": against.p, "p_holm": contrast.p_holm, "d_z": against.effect}
    return cells
