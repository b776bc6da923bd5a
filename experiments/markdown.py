"""Markdown of results: tables, and numbers that may be missing."""

import math


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number(x: float) -> str:
    """Two digits; `-` for nan."""
    return "-" if math.isnan(x) else f"{x:.2g}"


def count(n: float) -> str:
    """A number of parameters."""
    return f"{n / 1e6:.2f}M" if n >= 1e5 else f"{n / 1e3:.1f}k"
