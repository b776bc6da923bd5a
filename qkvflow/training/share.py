"""Which share of a model is trained, and the size of its optimizer state: counts, fractions, bytes."""

from dataclasses import dataclass

import equinox as eqx
import jax
from levanter.trainer_state import trainables_only
from levanter.utils.types import FilterTree
from optax import GradientTransformation

from qkvflow.training.checks import tree_bytes


@dataclass(frozen=True)
class TrainedShare:
    """
    Attributes:
        trained, total: numbers of parameters.
        trained_bytes: size of the trained parameters.
        optimizer_bytes: size of the optimizer's state for the trained parameters; full_optimizer_bytes: if all were.
    """

    trained: int
    total: int
    trained_bytes: int
    optimizer_bytes: int
    full_optimizer_bytes: int

    @staticmethod
    def of(shape: eqx.Module, trainable: FilterTree, optimizer: GradientTransformation) -> "TrainedShare":
        """From the shapes of a model; `trainable` is Levanter's filter."""
        part, everything = trainables_only(shape, trainable), trainables_only(shape, True)
        part_state, full_state = (
            tree_bytes(eqx.filter_eval_shape(optimizer.init, tree)) for tree in (part, everything)
        )
        return TrainedShare(_count(part), _count(everything), tree_bytes(part), part_state, full_state)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: the trained parameters and the optimizer's state."""
        return self.trained_bytes + self.optimizer_bytes

    @property
    def fraction(self) -> float:
        """Trained parameters over all."""
        return self.trained / self.total

    def describe(self, optimizer_bytes: int) -> str:
        """One line for a person; `optimizer_bytes` as measured."""
        return (
            f"trained: {self.trained:,} of {self.total:,} parameters ({self.fraction:.2%}); optimizer state "
            f"{optimizer_bytes / 1e6:,.2f} MB ({self.full_optimizer_bytes / 1e6:,.2f} MB if all were trained)"
        )

    def metrics(self, optimizer_bytes: int) -> dict[str, float]:
        """The same as metrics."""
        return {
            "finetune/trained_parameters": self.trained,
            "finetune/parameters": self.total,
            "finetune/trained_fraction": self.fraction,
            "finetune/optimizer_state_bytes": optimizer_bytes,
            "finetune/optimizer_state_bytes_if_all_were_trained": self.full_optimizer_bytes,
        }


def _count(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size"))
