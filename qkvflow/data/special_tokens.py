"""The tokens that begin and end texts, from all files that may name them: chat models have several ends."""

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


def special_token_id(folder: Path, tokenizer: MarinTokenizer, kind: str) -> int | None:
    """The token `bos` or `eos` of `special_tokens_map.json`; None if that names none that the tokenizer has.

    Raises:
        UserError: the file cannot be read.
    """
    named = _in_map(folder, kind)
    return None if named is None else tokenizer.get_vocab().get(named)


def named_elsewhere(folder: Path) -> dict[str, object]:
    """`begin` and `end`: the tokens that another file than `tokenizer_config.json` names, where it names none that the
    tokenizer has.

    Raises:
        UserError: a file cannot be read.
    """
    file, vocabulary, found = folder / "tokenizer_config.json", folder / "tokenizer.json", {}
    config = _read(file) if file.is_file() else {}
    content = vocabulary.read_text(encoding="utf-8") if vocabulary.is_file() else ""
    for name, kind in (("begin", "bos"), ("end", "eos")):
        own = _text(config.get(f"{kind}_token"))
        if own is None or not _stands_in(content, own):
            models = _named(folder) if kind == "eos" else []
            found[name] = _in_map(folder, kind) or next(iter(models), None)
    return {name: token for name, token in found.items() if token is not None}


def _in_map(folder: Path, kind: str) -> str | None:
    file = folder / "special_tokens_map.json"
    return _text(_read(file).get(f"{kind}_token")) if file.is_file() else None


def _stands_in(content: str, token: str) -> bool:
    """Whether the text of a `tokenizer.json` has a token, which may have escapes. Parsing it would take longer."""
    return any(json.dumps(token, ensure_ascii=escaped) in content for escaped in (True, False))


def _text(token: object) -> str | None:
    """A token in a file is its text, or an object that has it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


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
