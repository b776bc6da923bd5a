"""The tokens at which generation ends: chat models have several."""

import json
from pathlib import Path

from levanter.tokenizers import MarinTokenizer

from qkvflow.errors import UserError, first_line

GENERATION = "generation_config.json"


def end_tokens(folder: Path, tokenizer: MarinTokenizer) -> tuple[int, ...]:
    """The tokenizer's end-of-text token, and the `eos_token_id` of `generation_config.json` or else `config.json`.

    Args:
        folder: of the tokenizer, or a Hugging Face folder with a model.
        tokenizer: of that folder.

    Raises:
        UserError: the file cannot be read.
    """
    ids = [tokenizer.eos_token_id]
    for file in (folder / GENERATION, folder / "config.json"):
        found = _ids(file) if file.is_file() else None
        if found is not None:
            ids += found if isinstance(found, list) else [found]
            break
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < len(tokenizer)))


def _ids(file: Path) -> object:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from None
    return raw.get("eos_token_id") if isinstance(raw, dict) else None
