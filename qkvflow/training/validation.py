"""Loss on the validation text, by Levanter's evaluator."""

from collections.abc import Mapping, Sequence
from typing import Any

import levanter.tracker
from levanter.callbacks import StepInfo
from levanter.data import AsyncDataset
from levanter.eval import cb_tagged_lm_evaluate
from levanter.tracker.tracker import NoopTracker
from levanter.trainer import Trainer

from qkvflow.progress import perplexity


class Validation:
    """Evaluates a training state on the validation sets and logs `eval/loss`, `eval/perplexity` and parts.

    The loss is the mean over all tokens of all sets, in nats per token. The training state stays as it is.
    """

    def __init__(self, trainer: Trainer, sets: Sequence[tuple[AsyncDataset, Sequence[str]]]):
        """
        Args:
            trainer: gives mesh, precision and batch size; `max_eval_batches` limits each set.
            sets: Levanter's tagged validation sets; may be empty.
        """
        config = trainer.config
        limit = config.max_eval_batches
        self._evaluate = None
        if sets:
            self._evaluate = cb_tagged_lm_evaluate(
                config.EvalBatch,
                sets,
                # No tokenizer: Levanter's bits per byte are wrong for byte and character tokenizers.
                tokenizer=None,
                device_mesh=trainer.device_mesh,
                axis_mapping=trainer.compute_axis_mapping,
                max_examples_per_dataset=None if limit is None else limit * config.eval_batch_size,
                mp=config.mp,
            )

    @property
    def is_possible(self) -> bool:
        """Whether there is validation text."""
        return self._evaluate is not None

    def __call__(self, info: StepInfo) -> float:
        """The validation loss of the state after a step, logged with its parts."""
        metrics = self._measure(info)
        loss = float(metrics["eval/loss"])
        levanter.tracker.log({**metrics, "eval/perplexity": perplexity(loss)}, step=info.step)
        return loss

    def loss(self, info: StepInfo) -> float:
        """The validation loss of a state, not logged."""
        return float(self._measure(info)["eval/loss"])

    def _measure(self, info: StepInfo) -> dict[str, Any]:
        assert self._evaluate is not None
        collected = _Collector()
        with levanter.tracker.current_tracker(collected):
            self._evaluate(info)
        return collected.metrics


class _Collector(NoopTracker):
    """Catches what Levanter's evaluator logs: it returns nothing."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        self.metrics.update(metrics)
