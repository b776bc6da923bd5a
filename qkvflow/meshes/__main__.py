"""The process that `describe --mesh` starts: compiles a configuration for virtual CPUs or another machine."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.config import read_config
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.meshes.decoding import compile_decoding
from qkvflow.meshes.devices import move_to
from qkvflow.meshes.target import Target
from qkvflow.runs.config import FinetuneConfig
from qkvflow.runs.load import find_run
from qkvflow.training.finetune import finetune_start
from qkvflow.training.levanter_config import configure_jax
from qkvflow.training.start import start_of


@dataclass
class ChildConfig:
    """
    Attributes:
        given: configuration file, as written by `write_config`.
        run: the run that it belongs to, if any.
        tokens: size of the tokenizer's vocabulary.
        found: output file for the report.
        target: the machine to compile for; None for this process's virtual devices.
        slots: for a decoding step, compiled instead of a training step; dtype: of its model.
    """

    given: str
    tokens: int
    found: str
    run: str | None = None
    target: str | None = None
    slots: int | None = None
    dtype: str | None = None


def main(config: ChildConfig) -> None:
    """Writes the report of the step on all devices of this process."""
    train, start = read_config(Path(config.given), FinetuneConfig), None
    if config.run is not None:
        start = start_of(find_run(config.run))[1]
    elif train.mode is not None:
        train, start = finetune_start(train)
    configure_jax(train.trainer)
    target = None if config.target is None else Target.read(config.target)
    machine = None if target is None else move_to(target)
    if config.slots is not None and target is not None:
        report = compile_decoding(train, config.tokens, config.slots, config.dtype, target)
    else:
        report = compile_ahead(train, config.tokens, start=start, target=target, machine=machine)
    Path(config.found).write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    run_program(main, ChildConfig)
