"""Benchmarks: runs tasks of lm-evaluation-harness in this process, at any depth of a flow."""

from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.errors import UserError
from qkvflow.files import local_path
from qkvflow.generation.writer import writer_of
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.cached import CachedModel
from qkvflow.runs import Run

_BATCH = 8
_DOCUMENTS = "sample_len"  # the harness's name for how many there were


@dataclass(frozen=True)
class TaskOptions:
    """
    Attributes:
        names: of tasks.
        folder: with YAML files of further tasks.
        limit: of the documents of each task; all by default.
        shots: examples in front of each question; as the task says by default.
        batch_size: texts at a time; 8 by default.
    """

    names: Sequence[str]
    folder: str | None = None
    limit: int | None = None
    shots: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class TaskReading:
    """What tasks say of a model at one depth: task -> name of the number -> its value."""

    solver: str
    steps: int
    tasks: dict[str, dict[str, float]]


class Tasks:
    """Tasks that were found, to be asked of any number of models."""

    def __init__(self, options: TaskOptions):
        """
        Raises:
            UserError: the harness is not installed, there is no such task or folder, or a task's data is not available.
        """
        try:
            from qkvflow.generation import harness
        except ModuleNotFoundError as error:
            raise UserError(
                f"tasks need lm-evaluation-harness, and {error.name} is not installed: make setup EXTRA=dev,eval or, in"
                " a checkout, pip install '.[eval]'"
            ) from None
        folder = None if options.folder is None else local_path(options.folder)
        if folder is not None and not folder.is_dir():
            raise UserError(f"the folder {options.folder} does not exist (tasks_folder)")
        self._harness, self._options = harness, options
        self._manager = harness.task_manager(options.names, None if folder is None else str(folder))

    def read(self, run: Run, model: LmHeadModel) -> TaskReading:
        """Asks the tasks of a model, which is that of the run or the same flow at another depth."""
        options, writer = self._options, writer_of(run, model)
        # W(t) is evaluated once for all texts.
        whole = model.discretise() if isinstance(model, NeuralOdeLMHeadModel) else model
        asked = self._harness.HarnessModel(inference_mode(whole, True), writer, options.batch_size or _BATCH)
        found = self._harness.run_tasks(asked, self._manager, options.names, options.limit, options.shots)
        return TaskReading(*_depth(model), found)


def check_caches(models: Sequence[LmHeadModel]) -> None:
    """Refuses what `Tasks.read` would refuse, before a task is run with any of the models.

    Raises:
        UserError: a flow has adaptive steps, or more evaluations than can be cached.
    """
    for model in models:
        if isinstance(model, NeuralOdeLMHeadModel):
            eqx.filter_eval_shape(CachedModel.of, inference_mode(model, True))


def name_of(model: LmHeadModel) -> str:
    """How a model is read, for people."""
    solver, steps = _depth(model)
    return f"{solver}, {steps} steps" if solver != "-" else f"{steps} layers"


def task_table(readings: Sequence[TaskReading]) -> str:
    """The numbers as lines, each with its standard error where there is one."""
    lines = [f"{'task':<24}{'number':<20}{'solver':<9}{'steps':>6}{'value':>10}{'stderr':>10}"]
    for r in readings:
        for task, values in r.tasks.items():
            for name, value in values.items():
                if name == _DOCUMENTS or "_stderr" in name:
                    continue
                metric, _, rest = name.partition(",")
                error = values.get(",".join([f"{metric}_stderr", *([rest] if rest else [])]), float("nan"))
                lines.append(f"{task:<24}{name:<20}{r.solver:<9}{r.steps:>6}{value:>10.4f}{error:>10.4f}")
    return "\n".join(lines)


def _depth(model: LmHeadModel) -> tuple[str, int]:
    if isinstance(model, NeuralOdeLMHeadModel):
        return model.config.depth.solver, model.config.depth.reading_steps
    return "-", model.config.num_layers
