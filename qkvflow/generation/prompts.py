"""Prompts for programs: from the command line, standard input, or a file."""

import json
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

from qkvflow.errors import UserError
from qkvflow.files import local_path

_MARK = "\ufeff"  # the byte order mark that some editors prepend
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        control: its own control, if the file gives one.
        where: for messages.
    """

    text: str
    control: list[float] | None
    where: str


def read_prompts(prompt: str | None, file: str | None, stdin: TextIO | None = None) -> list[Prompt]:
    """The prompt, those of the file, or standard input as one prompt (without its last line break).

    Raises:
        UserError: no source or more than one, or the source is empty or cannot be read.
    """
    if prompt is not None and file is not None:
        raise UserError("prompt and prompt_file are both given: leave one of them out")
    if prompt is not None:
        return [Prompt(prompt, None, "the prompt")]
    if file is not None:
        return _from_file(local_path(file))
    stdin = sys.stdin if stdin is None else stdin
    if stdin is None or stdin.isatty():  # Python has none if it is closed
        raise UserError(
            'there is nothing to continue: give --prompt "..." or --prompt_file FILE, or pipe text into the program'
        )
    try:
        text = stdin.read().removeprefix(_MARK).removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in UTF-8: {error}") from None
    if not text:
        raise UserError('standard input is empty: pipe text into the program, or start a new text with --prompt ""')
    return [Prompt(text, None, "the prompt")]


def stop_strings(stop: str | list[str] | None) -> list[str]:
    r"""One stop string, or several as a list of quoted texts `["\n", "END"]`. In a single one \n, \t, \r and \\ are
    escapes."""
    if stop is None:
        return []
    if isinstance(stop, str) and stop.startswith(('["', "['")):
        import yaml

        try:
            stop = yaml.safe_load(stop)
        except (yaml.YAMLError, RecursionError) as error:
            raise UserError(f'stop: {stop!r} is not a list such as ["\\n", "END"]: {error}') from None
    elif isinstance(stop, str):
        text, stop = stop, ""
        while text:
            escape = _ESCAPES.get(text[:2])
            stop, text = stop + (escape or text[0]), text[2 if escape else 1 :]
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise UserError(f"stop must be a nonempty text or a list of nonempty texts; got {stop!r}")
    return stop


def _from_file(path: Path) -> list[Prompt]:
    try:
        text = path.read_bytes().decode("utf-8").removeprefix(_MARK)
    except FileNotFoundError:
        raise UserError(f"there is no prompt_file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt_file {path}: {error}") from None
    # Not `splitlines`, which also breaks at form feeds and at U+2028, which JSON text may contain.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    numbered = [(f"{path}, line {i}", line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"the prompt_file {path} is empty: it must have one prompt per line")
    if path.suffix.lower() == ".jsonl":
        return [_from_record(where, line) for where, line in numbered]
    return [Prompt(line, None, where) for where, line in numbered]


def _from_record(where: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UserError(
            f'{where} must be an object with a text `prompt`, such as {{"prompt": "Once", "control": [0, 1]}}'
        )
    if misspelt := get_close_matches("control", record.keys() - {"prompt", "control"}, cutoff=0.75):
        raise UserError(f"{where}: the key {misspelt[0]!r} would be ignored. Did you mean `control`?")
    return Prompt(record["prompt"], record.get("control"), where)
