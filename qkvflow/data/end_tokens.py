"""The tokens at which generation ends: chat models have several."""

import json
from pathlib import Path

from levanter.tokenizers import MarinTokenizer

from qkvflow.errors import UserError, first_line
from qkvflow.files import replacing

GENERATION = "generation_config.json"


def end_tokens(folder: Path, tokenizer: MarinTokenizer) -> tuple[int, ...]:
    """The tokenizer's end-of-text token, and the `eos_token_id` of `generation_config.json` or else `config.json`.

    Args:
        folder: of the tokenizer, or a Hugging Face folder with a model.
        tokenizer: of that folder.

    Raises:
        UserError: the file cannot be read.
    """
    ids = [tokenizer.eos_token_id, *_named(folder)]
    known = set(tokenizer.get_vocab().values())
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and i in known))


def record_end_tokens(source: Path, made: Path) -> None:
    """Adds to `made`, a copy of the tokenizer in `source`, the end tokens that only a model's files there name.

    Raises:
        UserError: a file cannot be read.
    """
    ends = _named(source)
    if ends != _named(made):
        file = made / GENERATION
        before = _read(file) if file.is_file() else {}
        with replacing(file) as fresh:
            fresh.write_text(json.dumps({**before, "eos_token_id": ends}) + "\n", encoding="utf-8")


def end_named_elsewhere(folder: Path) -> object | None:
    """The end token of another file, where `tokenizer_config.json` names none: of the tokenizer, or the model's first.

    Raises:
        UserError: a file cannot be read.
    """
    config, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    if config.is_file() and _read(config).get("eos_token") is not None:
        return None
    own = _read(special).get("eos_token") if special.is_file() else None
    return next(iter(_named(folder)), None) if own is None else own


def _named(folder: Path) -> list[object]:
    for file in (folder / GENERATION, folder / "config.json"):
        found = _read(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def _read(file: Path) -> dict[str, object]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from None
    return raw if isinstance(raw, dict) else {}
