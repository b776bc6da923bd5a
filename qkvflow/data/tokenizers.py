"""Tokenizers by one word: `byte`, `tiktoken:NAME`, a local folder or a Hugging Face name."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from levanter.tokenizers import MarinTokenizer
from levanter.tokenizers import load_tokenizer as load_levanter_tokenizer
from tokenizers import Tokenizer

from qkvflow.data.byte_level import END_OF_TEXT, byte_tokenizer
from qkvflow.data.hub import download_tokenizer
from qkvflow.data.special_tokens import GENERATION, end_tokens, named_elsewhere, record_end_tokens, special_token_id
from qkvflow.errors import UserError
from qkvflow.files import local_path, replacing
from qkvflow.inside.levanter import with_special_token, with_template, without_limits

_TEMPLATE = "chat_template.jinja"
# The files of a tokenizer in Hugging Face's layout; the first is required.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _TEMPLATE,
    GENERATION,
)
# Records the spec from which a folder was made, so that a run can resume without its source.
ORIGIN_FILE = "origin.json"
# Settings of `tokenizer.json` that would cut texts or fill them up.
_LIMITS = ("truncation", "padding")
# Texts on which tokenizers with the same vocabulary but different rules differ.
_PROBES = ("Hello, world! It's 12345.67 of them.", "  two  spaces\n\n\tand a tab", "naïve Ünïcödé 漢字 🙂 ﬁ")


def number_of_ids(tokenizer: MarinTokenizer) -> int:
    """The largest id of a tokenizer plus 1: its number of tokens, or more if its ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def resolve_tokenizer(spec: str, folder: Path, *, compare: bool = True) -> Path:
    """Writes the tokenizer that `spec` names to `folder`, in Hugging Face's layout.

    Args:
        spec: `byte` (ids are the bytes, 256 ends a document), `tiktoken:gpt2` (or another name that tiktoken knows;
            same ids), a local folder with `tokenizer.json`, or a name on the Hugging Face hub.
        folder: destination. If it was already made from the same spec, it is used unchanged.
        compare: whether a tokenizer that `folder` holds already must still be the one that `spec` names.

    Returns:
        `folder`; `levanter.tokenizers.load_tokenizer(str(folder))` and `transformers.AutoTokenizer` read it without a
        network.

    Raises:
        UserError: an unknown name, an incomplete folder, a source that cannot be reached, or a `folder` with another
            tokenizer.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        if compare:
            _refuse_other_origin(spec, folder)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
            made = Path(scratch)
            _make(spec, made)
            (made / ORIGIN_FILE).write_text(json.dumps({"spec": spec}) + "\n", encoding="utf-8")
            # tokenizer.json is written last: if it exists, the folder is complete.
            for file in sorted(made.iterdir(), key=lambda file: file.name == "tokenizer.json"):
                os.replace(file, folder / file.name)
    except OSError as error:
        raise UserError(f"cannot write the tokenizer to {folder}: {error.strerror or error}") from error
    return folder


def copy_tokenizer(source: Path, folder: Path, spec: str) -> Path:
    """Copies the tokenizer of another run, or of a Hugging Face folder, to `folder`, with the record of its origin.

    If `folder` already holds a tokenizer, it is used unchanged. Returns: `folder`.

    Args:
        spec: by which the run in whose folder it will be asks for it; recorded where `source` has no such record.
    """
    if not (folder / "tokenizer.json").is_file():
        check_folder(source)
        folder.mkdir(parents=True, exist_ok=True)
        files = [name for name in (*TOKENIZER_FILES[1:], ORIGIN_FILE) if (source / name).is_file()]
        for name in files:
            _copy_file(source / name, folder / name)
        if ORIGIN_FILE not in files:
            (folder / ORIGIN_FILE).write_text(json.dumps({"spec": spec}) + "\n", encoding="utf-8")
        record_end_tokens(source, folder)
        # The last one: if it exists, the folder is complete.
        _copy_file(source / TOKENIZER_FILES[0], folder / TOKENIZER_FILES[0])
    return folder


def same_tokenizer(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tokenizer: the same files, or the same ids on all probing texts."""
    if tokenizer_fingerprint(one) == tokenizer_fingerprint(other):
        return True
    first, second = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (one, other))
    for tokenizer in (first, second):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    if first.get_vocab() != second.get_vocab():
        return False
    return all(first.encode(text).ids == second.encode(text).ids for text in _PROBES)


def load_tokenizer(folder: Path) -> MarinTokenizer:
    """Levanter's tokenizer from a local folder; never uses the network.

    Differs from Levanter: `truncation` and `padding` of `tokenizer.json` have no effect, because every text is read
    whole and as it is.

    Tokens for begin and end of text that `tokenizer_config.json` does not name are those of `special_tokens_map.json`;
    without an end there, that is the first one that `generation_config.json` or else `config.json` names. A chat
    template in `chat_template.jinja` comes before the one in `tokenizer_config.json`.

    Raises:
        UserError: `folder` has no `tokenizer.json`, or it cannot be read.
    """
    check_folder(Path(folder))
    try:
        tokenizer = without_limits(load_levanter_tokenizer(str(folder)))
        file = Path(folder) / _TEMPLATE
        tokenizer = with_template(tokenizer, file.read_bytes().decode() if file.is_file() else None)
    except Exception as error:  # `tokenizers` raises plain Exception for a broken file
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if tokenizer.bos_token_id is None:
        begin = special_token_id(Path(folder), tokenizer, "bos")
        tokenizer = tokenizer if begin is None else with_special_token(tokenizer, "bos", begin)
    if tokenizer.eos_token_id is None:
        end = special_token_id(Path(folder), tokenizer, "eos")
        ends = end_tokens(Path(folder), tokenizer) if end is None else (end,)
        tokenizer = with_special_token(tokenizer, "eos", ends[0]) if ends else tokenizer
    return tokenizer


def tokenizer_fingerprint(folder: Path) -> str:
    """sha256 (hex) over the content of `tokenizer.json` and `tokenizer_config.json`, and over tokens for begin and end
    of text that only another file names."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES[:2]:
        file = Path(folder) / name
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for name, token in named_elsewhere(Path(folder)).items():
        digest.update(f"{name} {token}\n".encode())
    return digest.hexdigest()


def limits(folder: Path) -> list[str]:
    """Which of `truncation` and `padding` the `tokenizer.json` in a folder has, although they have no effect.

    Tokens that were made when they had one must not be used again.
    """
    content = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    if not re.search(rf'"({"|".join(_LIMITS)})"\s*:\s*\{{', content):  # parsing a large vocabulary takes longer
        return []
    try:
        settings = json.loads(content)
    except ValueError:  # `load_tokenizer` tells
        return []
    return [name for name in _LIMITS if settings.get(name) is not None]


def template_fingerprint(folder: Path) -> str | None:
    """sha256 (hex) of the chat template in a file of its own; None without one."""
    file = Path(folder) / _TEMPLATE
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def keep_template(template: str, folder: Path) -> None:
    """Makes `template` the chat template of the tokenizer in `folder`."""
    with replacing(folder / _TEMPLATE) as file:
        file.write_text(template, encoding="utf-8")


def check_folder(folder: Path) -> None:
    """Checks that a folder holds a tokenizer.

    Raises:
        UserError: `folder` is not a folder with a `tokenizer.json`.
    """
    if not folder.is_dir():
        raise UserError(f"the tokenizer folder {folder} does not exist (current folder: {Path.cwd()})")
    if not (folder / "tokenizer.json").is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise UserError(
            f"the tokenizer folder {folder} has no tokenizer.json (it holds: {found}). Save the tokenizer "
            "there with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )


def _make(spec: str, made: Path) -> None:
    if spec == "byte":
        _save(byte_tokenizer(), END_OF_TEXT, made)
    elif spec.startswith("tiktoken:"):
        _save_tiktoken(spec.removeprefix("tiktoken:"), made)
    elif local_path(spec).exists() or spec.startswith(("/", "./", "../", "~")):
        source = local_path(spec)
        check_folder(source)
        _copy(source, made)
    else:
        _copy(download_tokenizer(spec, TOKENIZER_FILES), made)
    load_tokenizer(made)


def _save(tokenizer: Tokenizer, end_of_text: str | None, made: Path) -> None:
    """Writes the two files; names an end-of-text token, but no begin-of-text token."""
    tokenizer.save(str(made / "tokenizer.json"))
    added = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "eos_token": end_of_text,
        "model_max_length": int(1e30),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    specials = {"eos_token": end_of_text} if end_of_text else {}
    (made / "special_tokens_map.json").write_text(json.dumps(specials, indent=2) + "\n", encoding="utf-8")


def _save_tiktoken(name: str, made: Path) -> None:
    import tiktoken

    from qkvflow.data.tiktoken_conversion import convert

    if name not in tiktoken.list_encoding_names():
        raise UserError(f"tiktoken has no encoding {name!r}; it has: {', '.join(tiktoken.list_encoding_names())}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tiktoken file of {name!r} is not on this machine and could not be fetched ({type(error).__name__})."
            " Set the environment variable TIKTOKEN_CACHE_DIR to a folder that contains it, or use a local tokenizer"
            " folder, or `tokenizer: byte`, which needs no file."
        ) from error
    _save(convert(encoding), END_OF_TEXT if END_OF_TEXT in encoding.special_tokens_set else None, made)


def _copy_file(source: Path, target: Path) -> None:
    with replacing(target) as fresh:
        shutil.copyfile(source, fresh)


def _copy(source: Path, made: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, made / name)
    record_end_tokens(source, made)


def _refuse_other_origin(spec: str, folder: Path) -> None:
    origin = folder / ORIGIN_FILE
    try:
        found = json.loads(origin.read_text(encoding="utf-8"))["spec"] if origin.is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{origin}, which records the source of this tokenizer, cannot be read: {error}. Remove the folder"
            f" {folder}: it will be recreated from `data.tokenizer`"
        ) from None
    source, is_made = local_path(spec), spec == "byte" or spec.startswith("tiktoken:")  # whatever the folder has
    if (source / "tokenizer.json").is_file() and not is_made:
        same = source.resolve() == folder.resolve() or tokenizer_fingerprint(source) == tokenizer_fingerprint(folder)
    else:  # older runs do not record a folder, which may be gone
        same = found == spec or (found is None and source.is_absolute())
    if not same:
        raise UserError(
            f"{folder} already contains another tokenizer (made from {found!r}; the configuration now asks for"
            f" {spec!r}, or its files have changed). A run keeps its tokenizer: start a new run for another one."
        )
