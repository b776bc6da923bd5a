"""Recipes: YAML configurations of train_lm or finetune_lm, with changes, applied to the text of a study."""

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.tokenizers import MarinTokenizer

from experiments.texts import Text
from qkvflow.config import decode, read_yaml
from qkvflow.data import check_enough_tokens
from qkvflow.data.tokenizers import load_tokenizer, resolve_tokenizer
from qkvflow.errors import UserError
from qkvflow.models import is_flow
from qkvflow.runs import RunDirectory
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.config import FinetuneConfig, TrainConfig

Changes = Mapping[str, Any]
# Keys of `trainer` for the devices, which change a training only by rounding (and masks of dropout). Not all of
# FREE_KEYS, because the hashes of the committed readings contain the others.
_OF_MACHINES = ("distributed", "mesh", "per_device_parallelism", "require_accelerator")


@dataclass(frozen=True)
class Recipe:
    """raw: the contents of the YAML; a fine-tune if it has a `mode`."""

    raw: Changes

    @staticmethod
    def of(path: str, *changes: Changes) -> "Recipe":
        """The configuration in a file, with changes."""
        return Recipe(read_yaml(Path(path))).but(*changes)

    def but(self, *changes: Changes) -> "Recipe":
        """With its leaves replaced by those of each of `changes`; the last one wins."""
        return Recipe(functools.reduce(merged, changes, self.raw))

    def on(self, text: Text, run_dir: Path, select_batches: int | None, evaluations: int) -> "Recipe":
        """Trained on `text`, in `run_dir`.

        Args:
            text: its part `select` is used for the loss during training.
            select_batches: number of batches for that loss; all if None.
            evaluations: number of its evaluations, evenly spaced.

        Raises:
            UserError: the configuration is invalid.
        """
        plain = self.config
        ours = {
            "run_dir": str(run_dir),
            "data": {
                "tokenizer": plain.data.tokenizer,
                "train": text.file("train"),
                "validation": text.file("select"),
                "cache_dir": str(run_dir / "cache"),
            },
            "trainer": {
                "num_train_steps": plain.trainer.num_train_steps,
                "max_eval_batches": select_batches,
                "checkpointer": {"save_interval": "2m", "keep": []},
                # A study is one process that has used JAX before: too late for what JAX would join on some clusters.
                "distributed": {"initialize_jax_distributed": False},
            },
            "optimizer": {"learning_rate": float(plain.optimizer.learning_rate)},
        }
        model = {} if plain.model is None else {"model": {"hidden_dim": plain.model.Embed.size}}
        rest = {key: value for key, value in self.raw.items() if key not in ("data", "run_dir")}
        return Recipe(rest).but(ours, model).evaluated(evaluations)

    def evaluated(self, evaluations: int) -> "Recipe":
        return self.but({"trainer": {"steps_per_eval": max(1, self.steps // evaluations)}})

    @functools.cached_property
    def config(self) -> TrainConfig:
        """Raises: UserError: if it cannot be read."""
        return decode(FinetuneConfig if "mode" in self.raw else TrainConfig, self.raw)

    @property
    def config_here(self) -> TrainConfig:
        """`config` for the devices of this machine, which share `eval_batch`.

        Raises:
            UserError: it cannot be read, or `eval_batch` cannot be divided among the devices.
        """
        trainer = self.config.trainer
        if trainer.per_device_eval_parallelism == trainer.per_device_parallelism == -1:
            return self.config
        size, shares = self.eval_batch, trainer.data_axis_size
        if size % shares:
            raise UserError(
                f"an evaluation reads {size} sequences at a time (`trainer.per_device_eval_parallelism`; by default"
                f" those of a training step), which {shares} devices cannot share equally. Make as many visible as do"
            )
        return dataclasses.replace(
            self.config, trainer=dataclasses.replace(trainer, per_device_eval_parallelism=size // shares)
        )

    @property
    def is_flow(self) -> bool:
        """See `qkvflow.models.is_flow`."""
        return is_flow(self.config.model)

    def euler_flow(self) -> Changes:
        """Its `model` as in YAML, with its number of steps.

        Raises:
            UserError: it is not an Euler flow on one fixed grid.
        """
        model = self.config.model
        is_one = self.is_flow and len(model.depth.stages) == 1 and not model.training_plans
        if not is_one or model.depth.is_general or model.depth.solver != "euler":
            raise UserError(
                "the model must be a `type: neuralode` whose weights are functions of time, trained with"
                " Euler on a fixed grid that does not grow"
            )
        return merged(self.raw["model"], {"depth": {"steps": model.depth.steps}})

    @property
    def steps(self) -> int:
        return self.raw["trainer"]["num_train_steps"]

    @property
    def rate(self) -> float:
        return self.raw["optimizer"]["learning_rate"]

    @property
    def batch(self) -> int:
        """Sequences of a training step.

        Raises:
            UserError: there are several sizes, or it depends on the devices.
        """
        size = self.config.trainer.train_batch_size
        if not isinstance(size, int) or size < 1:
            raise UserError(
                f"`trainer.train_batch_size` is {size}, but a study counts tokens and FLOPs by one size of all batches."
                " Give one positive number"
            )
        return size

    @property
    def eval_batch(self) -> int:
        """Sequences that an evaluation reads at a time: `per_device_eval_parallelism`, by default those of a training
        step.

        Differs from Levanter, where that key is a device's share, and by default the parts of a training step: what is
        evaluated must depend neither on the devices nor on the parts.
        """
        size = self.config.trainer.per_device_eval_parallelism
        return self.batch if size == -1 else size

    @property
    def tokens(self) -> int:
        """Tokens of a training step."""
        return self.config.Pos.size * self.batch

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.raw["run_dir"]) / self.raw["trainer"]["id"])

    @property
    def is_finished(self) -> bool:
        steps = checkpoint_steps(self.run.checkpoints)
        return bool(steps) and steps[-1] + 1 >= self.steps

    def tokenizer(self) -> MarinTokenizer:
        with tempfile.TemporaryDirectory() as folder:
            return load_tokenizer(resolve_tokenizer(self.config.data.tokenizer, Path(folder)))

    def check_report(self, text: Text) -> None:
        """Raises: UserError: the part `report` of a text is shorter than a sequence."""
        with tempfile.TemporaryDirectory() as folder:
            data = self.config.data.evaluating(text.file("report")).resolve(Path(folder))
            try:
                check_enough_tokens(data, self.config.Pos.size)
            except UserError as error:
                raise UserError(f"the text {text.name!r} is too short to report on: {error}") from None

    def digest(self, **more: str) -> str:
        """A hash of all that this configuration says about a training, and `more`; independent of paths and of the
        machine. Keys that it leaves to their defaults are not in it."""
        matter = {key: value for key, value in self.raw.items() if key not in ("data", "run_dir", "run")}
        if "trainer" in matter:
            matter["trainer"] = {key: value for key, value in matter["trainer"].items() if key not in _OF_MACHINES}
        matter |= {"tokenizer": self.raw["data"]["tokenizer"], **more}
        return hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:8]


def value_at(changes: Changes, key: str, default: Any = None) -> Any:
    """The value of a nested key, `model.depth.steps` say; `default` if it is not there."""
    value: Any = changes
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def merged(base: Changes, over: Changes) -> dict[str, Any]:
    """`base` with its leaves replaced by those of `over`; a section of another `type` replaces the whole section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        is_merged = isinstance(old, Mapping) and isinstance(value, Mapping) and not _is_of_other_type(old, value)
        result[key] = merged(old, value) if is_merged else value  # pyright: ignore
    return result


def ordinary(model: Changes, layers: int) -> Changes:
    """The same model with ordinary layers in place of its flow.

    A flow with per-layer weights and Euler steps of length 1 is a stack of ordinary layers; so embeddings, prelude and
    coda have the same names, and with the same seed the same initial weights, in all systems.
    """
    depth = {"solver": "euler", "steps": layers, "step_size": "residual"}
    replaced = {"weights": {"type": "per_layer"}, "depth": depth, "control": None}
    return merged(model, {"block": {"form": "sequential"}}) | replaced


def _is_of_other_type(old: Changes, new: Changes) -> bool:
    return "type" in old and "type" in new and old["type"] != new["type"]
