"""The process that `describe --mesh` starts: reads a configuration, compiles for its virtual devices, writes JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.config import read_config
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.runs.config import TrainConfig
from qkvflow.training.levanter_config import configure_jax


@dataclass
class ChildConfig:
    """
    given: file of the configuration, as `write_config` writes it.
    tokens: size of the tokenizer's vocabulary.
    found: where the report goes.
    """

    given: str
    tokens: int
    found: str


def main(config: ChildConfig) -> None:
    """Writes the report of the step on all devices of this process."""
    train = read_config(Path(config.given), TrainConfig)
    configure_jax(train.trainer)
    report = compile_ahead(train, config.tokens)
    Path(config.found).write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    run_program(main, ChildConfig)
