"""Run directories: their files, and how runs are opened, resumed and loaded."""

from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.load import Run, load_run
from qkvflow.runs.prepare import PreparedRun, prepare_run

__all__ = ["PreparedRun", "Run", "RunDirectory", "TrainConfig", "load_run", "prepare_run"]
