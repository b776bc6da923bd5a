"""The base of a fine-tune: a run or an official checkpoint, checked before work and identified by its hash."""

import abc
import dataclasses
import hashlib
import json
import os
import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel

from qkvflow import official
from qkvflow.config import decode, encode
from qkvflow.errors import UserError
from qkvflow.files import local_path, write_text
from qkvflow.places import Place, is_remote
from qkvflow.ranges import Count, Steps
from qkvflow.runs.directory import RunDirectory

_LLAMA = "transformer.block.self_attn."


@dataclass(frozen=True)
class OfficialConfig:
    """A checkpoint of the official implementation (SDML-KU/qkvflow); sizes follow from its arrays.

    Attributes:
        path: the folder of one checkpoint, `.../step-10000`.
        num_heads: attention heads, which the arrays do not show.
        steps: number of Euler steps it was trained with.
        max_seq_len: the longest sequence, for the Llama block; for GPT-2 it follows from the position embeddings.
        block: further keys of `model.block`, such as dropout: `{resid_pdrop: 0.1}`.
    """

    path: str
    num_heads: Count
    steps: Steps
    max_seq_len: Count = 2048
    block: dict[str, Any] = field(default_factory=dict)

    def read(self) -> LmHeadModel:
        """The model.

        Raises:
            UserError: the folder holds no official model, or the sizes do not fit.
        """
        arrays = official.read_checkpoint(local_path(self.path))
        try:
            if any(name.startswith(_LLAMA) for name in arrays):
                return official.load_llama(arrays, self.num_heads, self.steps, self.max_seq_len, **self.block)
            return official.load_gpt2(arrays, self.num_heads, self.steps, **self.block)
        except TypeError as error:
            raise UserError(f"`official.block`: {error}") from None


@dataclass(frozen=True)
class BaseRecord:
    """A run's `base.json`: the location and identity of its base.

    Attributes:
        path: of the base run or checkpoint, absolute; relative: the same as seen from the run, so that both may be
            moved.
        checkpoint_step: of a base run; None for an official checkpoint.
        model: the base's configuration, as plain data.
        sha256: of the base's arrays, see `fingerprint`.
    """

    path: str
    relative: str
    checkpoint_step: int | None
    model: dict[str, Any]
    sha256: str

    def write(self, directory: RunDirectory) -> None:
        write_text(directory.base, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @staticmethod
    def read(directory: RunDirectory) -> "BaseRecord | None":
        """What the run says of its base; None for a run without one.

        Raises:
            UserError: the file is damaged.
        """
        if not directory.base.is_file():
            return None
        try:
            return BaseRecord(**json.loads(directory.base.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{directory.base} cannot be read: {error}") from None

    def places(self, directory: RunDirectory) -> list[Path | Place]:
        """Where the base may lie now: at the recorded place, or moved together with the run. Something else may, too.

        Raises:
            UserError: there is nothing at either.
        """
        places = [_at(self.path), _at(self.relative, directory.location)]
        found = [place for place in places if place.exists()]
        if not found:
            raise UserError(
                f"the run {directory} contains only LoRA's parameters, and its base is missing: there is no"
                f" {places[0]}. Restore the base, there or at {places[1]}"
            )
        return found

    def check(self, base: "Base", loaded: LmHeadModel) -> None:
        """Compares a base with this record.

        Raises:
            UserError: `base`, whose parameters are those of `loaded`, is not the one recorded.
        """
        if decode(LmConfig, self.model) != base.model or fingerprint(loaded) != self.sha256:
            raise UserError(
                f"{base.path} is not the base that this run was made from: its parameters or its model have changed"
                f" since (expected sha256 {self.sha256[:12]}...). Restore the original base, or fine-tune the new one"
                " as a new run with --trainer.id NAME"
            )


def fingerprint(model: eqx.Module) -> str:
    """sha256 (hex) over all arrays of a model: where they stand in it, their types, shapes and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if eqx.is_array(leaf):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
            digest.update(array.view(np.uint8).data if array.ndim else array.tobytes())
    return digest.hexdigest()


def _at(path: str, folder: Path | Place = Path()) -> Path | Place:
    """The place that a path or URL means as seen from `folder`."""
    if is_remote(path):
        return Place.of(path)
    if isinstance(folder, Path) or os.path.isabs(path):
        return Path(os.fspath(folder)) / path
    scheme, _, rest = folder.url.partition("://")
    return Place(f"{scheme}://{posixpath.normpath(posixpath.join(rest, path))}")


@dataclass(frozen=True)
class Base(abc.ABC):
    """
    Attributes:
        path: its location.
        model: its configuration.
        Vocab: the axis of its vocabulary.
        tokenizer: the folder of its tokenizer, and the name by which its run asked for it; None for an official
            checkpoint.
    """

    path: Path | Place
    model: Any
    Vocab: Axis
    tokenizer: tuple[Path, str] | None

    @abc.abstractmethod
    def load(self) -> LmHeadModel:
        """Its parameters, on every device."""

    def keep(self) -> None:
        """Keeps the parameters from being removed when a run that they belong to is trained on."""
        return  # only a run goes on

    @property
    def checkpoint_step(self) -> int | None:
        """The step of a run's checkpoint."""
        return None

    def record(self, directory: RunDirectory, loaded: LmHeadModel) -> BaseRecord:
        """What the run in `directory` writes down of this base, whose parameters are those of `loaded`."""
        path, run = (str(p.resolve() if isinstance(p, Path) else p) for p in (self.path, directory.location))
        is_near = Place.of(path).scheme == Place.of(run).scheme and Place.of(path).bucket == Place.of(run).bucket
        relative = os.path.relpath(path, run) if is_near else path
        return BaseRecord(path, relative, self.checkpoint_step, encode(self.model), fingerprint(loaded))


@dataclass(frozen=True)
class OfficialBase(Base):
    """An official checkpoint; its arrays are read at once, because they tell its sizes."""

    loaded: LmHeadModel

    @staticmethod
    def open(config: OfficialConfig) -> "OfficialBase":
        model = config.read()
        return OfficialBase(local_path(config.path), model.config, model.Vocab, None, model)

    def load(self) -> LmHeadModel:
        return self.loaded
