"""A Hugging Face folder: its contents, without reading any array."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError, safe_open

from qkvflow.errors import UserError, first_line

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_PICKLES = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Stored:
    """An array in a file.

    Attributes:
        dtype: safetensors' name: F32, BF16, I8, ...
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HubFolder:
    """`config.json`, `model.safetensors` (or several files and an index), and the tokenizer's files."""

    path: Path

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether there is a model in Hugging Face's format, valid or not."""
        return (path / CONFIG).is_file()

    @cached_property
    def settings(self) -> Any:
        """`config.json`, as read by transformers' own class; never runs code from the folder.

        Raises:
            UserError: it is damaged, or for a model that transformers does not know.
        """
        from transformers import CONFIG_MAPPING

        raw = read_json(self.path / CONFIG)
        kind = raw.get("model_type")
        if kind == "qkvflow":
            raise UserError(f"{self.path} was exported by qkvflow from a run: use that run instead")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise UserError(f"{self.path} contains a model of type {kind!r}, which is not supported")
        try:
            return CONFIG_MAPPING[kind].from_dict(raw)
        except Exception as error:  # transformers checks some values, in many ways
            raise UserError(f"{self.path / CONFIG} cannot be read: {first_line(error)}") from None

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files with arrays.

        Raises:
            UserError: there is none, a file named in the index is missing, or there are two models.
        """
        index = self.path / INDEX
        if not index.is_file():
            if not (self.path / WEIGHTS).is_file():
                raise UserError(
                    f"{self.path} has no {WEIGHTS} (nor {INDEX}). Other file formats are refused, because loading them"
                    " can run code: save the model again with transformers, save_pretrained(folder)"
                )
            if (self.path / _PICKLES).is_file():
                raise UserError(
                    f"{self.path} has both {WEIGHTS} and {_PICKLES}, whose weights may differ and which some programs"
                    " read first. Keep only the first, in a copy of the folder"
                )
            return (self.path / WEIGHTS,)
        names = read_json(index).get("weight_map")
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{index} is damaged: it has no weight_map")
        files = tuple(self.path / name for name in sorted(set(names.values())))
        if (self.path / WEIGHTS).is_file() and files != (self.path / WEIGHTS,):
            raise UserError(
                f"{self.path} has both {WEIGHTS} and {INDEX}, which names other files: their weights may differ, and"
                " other programs read the first. Keep only the one that is the model, in a copy of the folder"
            )
        for file in files:
            if file.parent != self.path or not file.is_file():
                raise UserError(f"{self.path} is incomplete: {INDEX} names {file.name}, which is missing")
        return files

    @staticmethod
    def is_whole(path: Path) -> bool:
        """Whether a folder has a model with all its files."""
        try:
            return HubFolder.is_one(path) and bool(HubFolder(path).files)
        except UserError:
            return False

    @cached_property
    def arrays(self) -> dict[str, Stored]:
        """The arrays by name.

        Raises:
            UserError: a file is damaged.
        """
        found = {}
        for file in self.files:
            try:
                with safe_open(file, "np") as arrays:
                    for name in arrays.keys():  # noqa: SIM118
                        slice_ = arrays.get_slice(name)
                        found[name] = Stored(file, tuple(slice_.get_shape()), slice_.get_dtype())
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or incomplete: {first_line(error)}") from None
        return found

    def read(self, name: str) -> jax.Array:
        """One of the arrays."""
        with safe_open(self.arrays[name].file, "flax") as arrays:
            return arrays.get_tensor(name)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, or holds something other than an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} cannot be read: it does not contain a JSON object")
    return raw
