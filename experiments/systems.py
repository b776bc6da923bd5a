"""Systems of experiments: a configuration of train_lm with other settings, on the text of the experiment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.texts import Text
from qkvflow.config import decode, read_yaml
from qkvflow.runs.config import TrainConfig


def system(
    path: str, overrides: Mapping[str, Any], text: Text, run_dir: Path, select_batches: int | None
) -> dict[str, Any]:
    """The configuration at `path` with `overrides`, trained on `text` in `run_dir`, see `on_text`."""
    return on_text(merged(read_yaml(Path(path)), overrides), text, run_dir, select_batches)


def on_text(raw: dict[str, Any], text: Text, run_dir: Path, select_batches: int | None) -> dict[str, Any]:
    """The configuration `raw` of train_lm, trained on `text` in `run_dir`; it has no name and no seed yet.

    Args:
        select_batches: of how many batches the loss on the part `select` is.

    Errors: `UserError` if the configuration cannot be read.
    """
    plain = decode(TrainConfig, raw)
    ours = {
        "run_dir": str(run_dir),
        "data": {
            "tokenizer": plain.data.tokenizer,
            "train": text.file("train"),
            "validation": text.file("select"),
            "cache_dir": str(run_dir / "cache"),
        },
        "model": {"hidden_dim": plain.model.Embed.size},
        "trainer": {
            "num_train_steps": plain.trainer.num_train_steps,
            "max_eval_batches": select_batches,
            "checkpointer": {"save_interval": "2m", "keep": []},
        },
        "optimizer": {"learning_rate": float(plain.optimizer.learning_rate)},
    }
    return merged({key: value for key, value in raw.items() if key not in ("data", "run_dir")}, ours)


def evaluated(raw: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """The loss on `select` is read so many times during a training, at equal distances."""
    return merged(raw, {"trainer": {"steps_per_eval": max(1, raw["trainer"]["num_train_steps"] // evaluations)}})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `over` in place of its own; what `over` gives another `type` stands for itself."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        is_merged = isinstance(old, Mapping) and isinstance(value, Mapping) and not _is_of_other_type(old, value)
        result[key] = merged(old, value) if is_merged else value  # pyright: ignore
    return result


def _is_of_other_type(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "type" in old and "type" in new and old["type"] != new["type"]
