"""The training data that a run was started with: recorded, and compared when the run resumes."""

import json
from collections.abc import Mapping
from pathlib import Path

from qkvflow.errors import UserError
from qkvflow.files import write_text

_SHOWN = 5


def write(path: Path, data: Mapping[str, str]) -> None:
    """Writes `data.json`: names of files (or of other sources) and their content."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def changes(path: Path, data: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The names whose content differs from what `data.json` says, each with the old and the new content.

    Data that was only moved, and a run that has no `data.json` yet, have no changes.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        old: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. If you are sure that the data is unchanged since the run started, remove"
            " this file"
        ) from None
    if [*old.values()] == [*data.values()]:
        return {}
    names = [name for name in {**old, **data} if old.get(name) != data.get(name)]
    return {name: (old.get(name), data.get(name)) for name in names or data}  # no name: the order has changed


def refusal(run: str, changes: Mapping[str, tuple[str | None, str | None]]) -> UserError:
    """What to tell the user whose data changed."""
    lines = [f"  {name}: {_say(*change)}" for name, change in changes.items()]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    listing = "\n".join(lines[:_SHOWN] + more)
    return UserError(
        f"the data of the run {run} has changed since it was started:\n{listing}\nNothing was changed in the run."
        " Restore the data; or continue with the new data with --accept_changes true; or start a new run with"
        " --trainer.id NAME"
    )


def _say(old: str | None, new: str | None) -> str:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    return "a different position in the order" if old == new else f"it was {old}, and is {new}"
