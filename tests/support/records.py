"""Records as a file."""

import json
from pathlib import Path


def write(name: str, records) -> str:
    """Writes records to a .jsonl file; returns its name."""
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name
