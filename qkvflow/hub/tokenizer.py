"""The tokenizer of a Hugging Face folder, in the file format of runs."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qkvflow.data import load_tokenizer
from qkvflow.data.special_tokens import record_end_tokens
from qkvflow.data.tokenizers import ORIGIN_FILE, TOKENIZER_FILES, copy_tokenizer
from qkvflow.errors import UserError, first_line

# For tokenizers stored before `tokenizer.json` existed.
OLD_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt")


@contextlib.contextmanager
def save_tokenizer(source: Path, name: str) -> Iterator[Path]:
    """A folder with the tokenizer in `source`, as a context manager; transformers converts an older format.

    Args:
        name: the name by which a run refers to it.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="qkvflow-") as scratch:
        made = Path(scratch) / "tokenizer"
        if (source / TOKENIZER_FILES[0]).is_file():
            load_tokenizer(source)  # a message names this folder, not the copy
            copy_tokenizer(source, made, name)
        else:
            _convert(source, made)
        (made / ORIGIN_FILE).write_text(json.dumps({"spec": name}) + "\n", encoding="utf-8")
        record_end_tokens(source, made)
        yield made


def _convert(source: Path, made: Path) -> None:
    from transformers import AutoTokenizer

    if not any((source / name).is_file() for name in OLD_FILES):
        raise UserError(f"{source} has no tokenizer: put its {TOKENIZER_FILES[0]} in that folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source.resolve()), local_files_only=True, trust_remote_code=False
        )  # by default it would ask on the terminal whether to run code of the folder
        tokenizer.save_pretrained(str(made))
    except Exception as error:  # transformers raises many kinds
        raise UserError(
            f"the tokenizer in {source} cannot be converted to {TOKENIZER_FILES[0]}: {first_line(error)}"
        ) from None
