"""Trains a language model from one YAML file into a run directory, and resumes the run if it exists."""

from pathlib import Path

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.program import conclude
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.places import Place
from qkvflow.runs.config import TrainConfig
from qkvflow.training.session import train_run
from qkvflow.training.start import FromScratch


def main(config: TrainConfig) -> Path | Place:
    """Trains, and prints where the run is stored and what can be done next.

    Returns:
        the run directory.

    Raises:
        UserError: before any work if a setting cannot work.
        SystemExit: with the signal's status if SIGTERM or Ctrl-C stopped the training; a checkpoint is written first.
    """
    with quiet_libraries() as quiet:
        trained = train_run(config, FromScratch.of, quiet)
    conclude(trained.text, trained.exit_status)
    return trained.path


if __name__ == "__main__":
    run_program(main, TrainConfig)
