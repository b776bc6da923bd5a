"""Fingerprints of data and tokenizer: the name of a token cache identifies its exact source."""

import dataclasses
import functools
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import jax
from levanter.data.text import HfDatasetSourceConfig, LmDatasetSourceConfigBase, UrlDatasetSourceConfig
from levanter.utils.fsspec_utils import expand_glob

from qkvflow.data.builtin import documents_of
from qkvflow.data.holdout import is_short
from qkvflow.data.readers import is_plain_text
from qkvflow.data.sources import BuiltinSource, FilesSource
from qkvflow.errors import UserError

# Increment it when the same text would produce different tokens.
_CACHE_FORMAT = 1
_WHOLE_CONTENT_BYTES = 256 << 20
_PART_BYTES = 1 << 20


def cache_fingerprint(source: LmDatasetSourceConfigBase, settings: dict[str, Any]) -> str:
    """16 hexadecimal digits that depend on the data and on every setting that affects its tokens.

    Args:
        source: the source of the data.
        settings: what else determines the tokens (tokenizer content, bos and eos, format), as JSON-like data.
    """
    description = json.dumps([_CACHE_FORMAT, source_identity(source), settings], sort_keys=True, default=repr)
    return hashlib.sha256(description.encode()).hexdigest()[:16]


def source_identity(source: LmDatasetSourceConfigBase) -> Any:
    """JSON-like data that changes when the data does.

    Local files: absolute path, size, modification time and sha256 of the content (beyond 256 MB: of its first and last
    MB). Built-in text: sha256 of the text. Hugging Face and remote files: their names.
    """
    if isinstance(source, FilesSource):
        splits = [[file_identity(path) for path in source.files(split)] for split in ("train", "validation")]
        return ["files", *splits, source.validation_fraction, source.text_key, *_newer_split(source)]
    if isinstance(source, BuiltinSource):
        return ["builtin", _builtin_hash(source.text)]
    if isinstance(source, HfDatasetSourceConfig):
        local = file_identities_below(Path(source.id)) if Path(source.id).is_dir() else None
        return ["hf", source.id, source.name, source.revision, source.splits, local]
    if isinstance(source, UrlDatasetSourceConfig):
        return [
            "url",
            *[[_url_identity(url) for url in urls] for urls in (source.train_urls, source.validation_urls)],
        ]
    return [type(source).__name__, dataclasses.asdict(source)]


def _newer_split(source: FilesSource) -> list[str]:
    """What distinguishes the split of files from the one that older token caches with the same settings have."""
    fraction, files = source.validation_fraction, source.files("train")
    if not fraction:
        return []
    texts = [path for path in files if is_plain_text(path)]
    names = ["short texts"] if any(is_short(path.stat().st_size, fraction) for path in texts) else []
    return [*names, "read keys"] if source.read_keys and len(texts) < len(files) else names


class FileIdentity(NamedTuple):
    """
    Attributes:
        path: absolute.
        changed: in ns.
        sha256: of the content, or of the two ends of a very large file.
    """

    path: str
    size: int
    changed: int
    sha256: str


def file_identity(path: Path) -> FileIdentity:
    """Path, size, modification time and hash of a file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        status = path.stat()
        sha256 = _content_hash(path.resolve(), status.st_size, status.st_ctime_ns)
        return FileIdentity(str(path.resolve()), status.st_size, status.st_mtime_ns, sha256)
    except OSError as error:
        raise UserError(
            f"the data file {path} cannot be read: {error.strerror} (current folder: {Path.cwd()})"
        ) from error


def file_identities_below(folder: Path) -> list[FileIdentity]:
    """The identities of all files in a folder, ordered by name."""
    return [file_identity(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def source_record(name: str, source: LmDatasetSourceConfigBase) -> dict[str, str]:
    """The record that a run keeps of the data of its component `name`: each file and its content, in order.

    A file of up to 256 MB is identified by size and hash, independent of path and time; a larger file also by its time,
    because only its two ends are hashed. For a built-in text, which depends on the Python version, the record includes
    that version. Remote data cannot be identified.
    """
    if isinstance(source, BuiltinSource):
        python = platform.python_version()
        return {f"the built-in text of {name!r} ({source.text}, Python {python})": str(source_identity(source)[-1])}
    leaves = jax.tree.leaves(source_identity(source), is_leaf=lambda x: isinstance(x, FileIdentity))
    return {leaf.path: _content(leaf) for leaf in leaves if isinstance(leaf, FileIdentity)}


def _content(file: FileIdentity) -> str:
    content = f"{file.size} bytes, sha256 {file.sha256}"
    return content if file.size <= _WHOLE_CONTENT_BYTES else f"{content} of its ends, changed at {file.changed} ns"


@functools.cache
def _builtin_hash(text: str) -> str:
    texts = [[*documents_of(text, split)] for split in ("train", "validation")]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


@functools.cache
def _content_hash(path: Path, size: int, changed: int) -> str:
    """Reads each content only once; `changed` is a time that only the file system can set."""
    with path.open("rb") as file:
        if size <= _WHOLE_CONTENT_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(file.read(_PART_BYTES))
        file.seek(-_PART_BYTES, os.SEEK_END)
        digest.update(file.read(_PART_BYTES))
        return digest.hexdigest()


def _url_identity(pattern: str) -> list[Any]:
    """One entry for each local file that matches the pattern; a remote pattern is its own entry."""
    remote = "://" in pattern and not pattern.startswith("file://")
    if remote:
        return [pattern]
    urls = [*expand_glob(pattern)]
    if not urls:
        raise UserError(f"no file matches {pattern!r} (current folder: {Path.cwd()})")
    if any(url.endswith(".txt") for url in urls):
        raise UserError(f"{pattern!r}: a source of `type: url` does not support .txt; use `type: files` with `train`")
    return [file_identity(Path(url.removeprefix("file://"))) for url in urls]
