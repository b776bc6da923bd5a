"""CSV of results: a line for each mapping, a column for each key that any of them has."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns stand in the order in which their keys first appear; values that are lists are left out."""
    rows = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
