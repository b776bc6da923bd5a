"""Folders on this machine or in a bucket (`gs://`, `s3://`), by the same few calls."""

import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from qkvflow.files import replacing

_TAGS = ("md5Hash", "ETag", "etag")  # by which stores tell one content from another, the best first
_THREADS = 16  # requests at a time


def is_remote(path: str | os.PathLike) -> bool:
    """Whether this is a URL."""
    return "://" in os.fspath(path)


@dataclass(frozen=True)
class FileInfo:
    """
    Attributes:
        bytes: size.
        tag: what the store says of its content, which changes with it; None on disks.
    """

    bytes: int
    tag: str | None


@dataclass(frozen=True)
class Place:
    """A folder, which may not exist. On this machine its path is taken literally, whatever characters it has.

    Attributes:
        url: an absolute path, or a URL.
    """

    url: str

    @staticmethod
    def of(path: "str | os.PathLike | Place") -> "Place":
        if isinstance(path, Place):
            return path
        text = os.fspath(path)
        return Place(text.rstrip("/") if is_remote(text) else os.path.abspath(text))

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def parent(self) -> "Place":
        return Place(self.url.rpartition("/")[0] or "/")

    @property
    def is_remote(self) -> bool:
        return is_remote(self.url)

    @property
    def scheme(self) -> str:
        """`gs` or `s3` of a bucket; `file` on this machine."""
        return urllib.parse.urlparse(self.url).scheme if self.is_remote else "file"

    @property
    def bucket(self) -> str:
        """The name of the bucket that it lies in; empty on this machine."""
        return self._path.partition("/")[0]

    @property
    def local(self) -> Path:
        """The path of a folder on this machine."""
        assert not self.is_remote
        return Path(self.url)

    def resolved(self) -> "Place":
        """The same without symbolic links."""
        return self if self.is_remote else Place(str(self.local.resolve()))

    def folders(self) -> list[str]:
        """Names of the folders in it."""
        return [name for name, is_folder in self._entries().items() if is_folder]

    def files(self) -> dict[str, FileInfo]:
        """All files in it and below, by their path from here."""
        found: dict[str, Any] = self._fs.find(self._path, detail=True)
        here = self._path.rstrip("/") + "/"
        return {
            name.removeprefix(here): FileInfo(
                int(info["size"]), next((str(info[key]).strip('"') for key in _TAGS if info.get(key)), None)
            )
            for name, info in sorted(found.items())
            if name.startswith(here)
        }

    def names(self) -> list[str]:
        """Names of the files and folders in it."""
        return list(self._entries())

    def files_outside(self, folders: Sequence[str]) -> list[str]:
        """All files in it and below, by their path from here, without a look into the `folders` in it."""
        entries = self._entries()
        below = [name for name, is_folder in entries.items() if is_folder and name not in folders]
        found = [name for name, is_folder in entries.items() if not is_folder]
        return found + [f"{folder}/{name}" for folder in below for name in (self / folder).files()]

    def exists(self) -> bool:
        """Whether there is such a folder; in a bucket: one with files."""
        return bool(self._entries()) if self.is_remote else self.local.exists()

    def require_bucket(self) -> None:
        """Raises:
        FileNotFoundError: the bucket that it lies in is not there.
        """
        self._fs.ls(self.bucket)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self._fs.isfile(self._at(name))

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: it is not there; whatever else the store says.
        """
        return self._fs.cat_file(self._at(name))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file so that it is there whole or not at all."""
        if self.is_remote:
            self._fs.pipe_file(self._at(name), content)
            return
        with replacing(self.local / name) as fresh:
            fresh.write_bytes(content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a file in a bucket that is not there yet.

        Raises:
            FileExistsError: it is; also if another process has made it just now.
        """
        self._fs.pipe_file(self._at(name), content, mode="create")

    def remove(self, name: str | None = None) -> None:
        """Removes a file, or the folder with all that is in it."""
        if name is not None:
            self._fs.rm_file(self._at(name))
        elif not self.is_remote:
            shutil.rmtree(self.url)
        else:  # file by file: `rm` takes some characters of paths for patterns
            _each(self._fs.rm_file, (self._at(name) for name in self.files()))

    def move_to(self, target: "Place") -> None:
        """Both must lie on the same disk, or in the same bucket."""
        if not self.is_remote:
            target.local.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.url, target.url)
            return
        _each(lambda name: self._fs.cp_file(self._at(name), target._at(name)), self.files())
        self.remove()

    @property
    def _fs(self) -> AbstractFileSystem:
        # TensorStore writes past fsspec, whose memory of what there was would be wrong.
        return fsspec.filesystem(self.scheme, **({"use_listings_cache": False} if self.is_remote else {}))

    @property
    def _path(self) -> str:
        return self.url.split("://", 1)[1] if self.is_remote else self.url

    def _entries(self) -> dict[str, bool]:
        """What is in it: names, and whether they are folders."""
        try:
            found = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {PurePosixPath(info["name"]).name: info["type"] == "directory" for info in sorted(found, key=_name)}

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


def _each(action: Callable[[str], Any], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(action, names))


def _name(info: dict[str, Any]) -> str:
    return info["name"]
