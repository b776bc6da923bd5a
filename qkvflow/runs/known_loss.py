"""The recorded validation loss of a run, and warnings if its flow does not work with other depth settings."""

import math
import warnings
from collections.abc import Mapping

from levanter.models.lm_model import LmHeadModel

from qkvflow.errors import Notice, UserError, first_line
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.evaluate import RunEvaluator, on_other_text
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

# A perplexity more than twice that of training: far beyond what another number of sequences makes of a loss.
_LOST = math.log(2)
_SEQUENCES = 4


def known_loss(run: Run) -> float | None:
    """The last validation loss that was logged up to the checkpoint, nats per token; None without any."""
    try:
        records = read_metrics(RunDirectory(run.path).metrics)
    except OSError:
        return None
    losses = [record["eval/loss"] for record in records if record["step"] <= run.step and "eval/loss" in record]
    return losses[-1] if losses and math.isfinite(losses[-1]) else None


def warn_of_lost(run: Run, losses: Mapping[str, float]) -> None:
    """Warns (`Notice`) if a loss on the run's validation text is far above the recorded one.

    Args:
        losses: by description, such as `euler with 24 steps`.
    """
    known = known_loss(run)
    lost = {name: loss for name, loss in losses.items() if known is not None and not loss < known + _LOST}
    if lost:
        listing = ", ".join(f"{name} {loss:.3f}" for name, loss in lost.items())
        text = (
            f"the flow of {run.path} does not work at this depth or with this solver: its validation loss was"
            f" {known:.3f} in training, and is now: {listing}. Use settings closer to training, train with"
            " `time_sampling: jitter`, or fine-tune it with these settings"
        )
        warnings.warn(Notice(text), stacklevel=2)


def warn_if_lost(run: Run, model: LmHeadModel, name: str) -> None:
    """`warn_of_lost` of one reading, measured on a few sequences. It needs the run's text on this machine.

    Args:
        model: the run's, at another depth.
        name: of the reading, in words.
    """
    if known_loss(run) is None:
        return
    try:
        evaluator = RunEvaluator(on_other_text(run, {"auto_build_caches": False}), _SEQUENCES, max_batches=1)
    except UserError as error:
        text = f"whether {name} is a depth at which the flow works was not checked: {first_line(error)}"
        warnings.warn(Notice(text), stacklevel=2)
        return
    warn_of_lost(run, {name: evaluator.loss(model)})
