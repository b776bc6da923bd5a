"""Loss on the validation text, by Levanter's evaluator."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import levanter.tracker
from levanter.callbacks import StepInfo
from levanter.data import AsyncDataset
from levanter.eval import cb_tagged_lm_evaluate
from levanter.tracker.tracker import NoopTracker

from qkvflow.progress import perplexity
from qkvflow.training.finite import FiniteTrainer
from qkvflow.training.step import at_stage


class Validation:
    """Evaluates a training state on the validation sets and logs `eval/loss`, `eval/perplexity` and parts.

    The loss is the mean over all tokens of all sets, in nats per token. The training state stays as it is. A model
    whose depth grows is read at the depth of the present stage.
    """

    def __init__(self, trainer: FiniteTrainer, sets: Sequence[tuple[AsyncDataset, Sequence[str]]]):
        """
        Args:
            trainer: gives mesh, precision and batch size; `max_eval_batches` limits each set.
            sets: Levanter's tagged validation sets; may be empty.
        """
        config, self._trainer = trainer.config, trainer
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

    def loss(self, info: StepInfo, stage: int | None = None) -> float:
        """The validation loss of a state, not logged; at the depth of another stage if given."""
        return float(self._measure(info, stage)["eval/loss"])

    def _measure(self, info: StepInfo, stage: int | None = None) -> dict[str, Any]:
        assert self._evaluate is not None
        stage = self._trainer.stage if stage is None else stage
        read = SimpleNamespace(
            step=info.step,
            state=info.state,
            model=at_stage(info.model, stage),
            eval_model=at_stage(info.eval_model, stage),
        )
        collected = _Collector()
        with levanter.tracker.current_tracker(collected):
            self._evaluate(read)
        return collected.metrics


class _Collector(NoopTracker):
    """Catches what Levanter's evaluator logs: it returns nothing."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        self.metrics.update(metrics)
