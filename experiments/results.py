"""The results of an experiment: made and written to `results.json`, or read from there; a page of them, shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkvflow.errors import UserError

Record = dict[str, Any]


def indented(record: Record) -> str:
    """JSON for people."""
    return json.dumps(record, indent=1) + "\n"


def made_by(record: Record) -> str:
    """The last line of a protocol: machine, date and command, from what `jobs.origin` gave."""
    machine = record["machine"]
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    where = f"{machine['device']}, {cores}, JAX {machine['jax']}, {record['date']}"
    return f"{where}. Command: `{record['command']}`"


def kept_in(output: Path, make: Callable[[], Record] | None, write: Callable[[Record], str] = indented) -> Record:
    """What `make` returns, written to `results.json` in the folder `output`; what stands there, if `make` is None.

    Errors: `UserError` if nothing stands there.
    """
    path = output / "results.json"
    if make is not None:
        record = make()
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(write(record))
    if not path.is_file():
        raise UserError(
            f"there are no results in {output}: run the experiment first, without --redraw, or name"
            " their folder by --output"
        )
    return json.loads(path.read_text())


def show(page: str, output: Path, name: str = "results.md") -> None:
    """Writes a page of Markdown to `output`, and prints it."""
    (output / name).write_text(page)
    print(page)
    print(f"Written to {output}", flush=True)
