"""The rule by which the seed called the flow's gradients healthy, and what it cannot show."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOSS_RATIO, GRADIENT = 1.1, 0.01

CANNOT_SHOW = (
    f"A loss ratio below {LOSS_RATIO} after so few steps: most of the loss is then what frequencies of single tokens"
    " explain, which needs no middle at all. Where a model without a middle (shallow) is put to the same rule and"
    " passes, the ratio says nothing about the flow.",
    f"A mean norm above {GRADIENT}: it scales with the loss, the number of parameters and alpha, and is no share of"
    " anything; the mean can be made by a few steps. That a gradient arrives does not mean that the flow learns.",
    "That the flow is continuous: the rule never reads it with another number of steps.",
    "Anything about chance: the seed has one training of each model. Here n is given.",
)


@dataclass(frozen=True)
class Verdict:
    """
    ratio: mean training loss over the last steps, of a model divided by that of the baseline.
    gradient: mean norm of the flow's gradient, after clipping as in the seed; None for a model without a flow.
    """

    ratio: float
    gradient: float | None

    @property
    def passes(self) -> bool:
        return self.ratio < LOSS_RATIO and (self.gradient is None or self.gradient > GRADIENT)


def verdict(
    losses: Sequence[float], baseline: Sequence[float], flow_norms: Sequence[float] | None, last: int
) -> Verdict:
    """The seed's rule for one seed.

    Args:
        losses, baseline: training losses by step, of the model and of the baseline.
        flow_norms: norms by step of the flow's gradient after clipping; None for a model without a flow.
        last: number of steps at the end over which losses are averaged.
    """
    ratio = final(losses, last) / final(baseline, last)
    return Verdict(ratio, None if flow_norms is None else statistics.fmean(flow_norms))


def final(losses: Sequence[float], last: int) -> float:
    """Mean over the last steps."""
    return statistics.fmean(losses[-last:])
