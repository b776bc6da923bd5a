"""The search of learning rates: at one width, on a grid that grows, transferred to other widths by a rule."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.config import RatesConfig
from experiments.records import Training
from qkvflow.errors import UserError
from qkvflow.ranges import Count

Tried = Mapping[float, float]  # rate -> mean final loss on the part `select`; infinite if a training diverged


@dataclass
class SearchConfig(RatesConfig):
    """In addition to `RatesConfig`:

    Attributes:
        search_width: `hidden_dim` of the search; null: a search at each width.
        transfer: a rate of the search is multiplied by (search_width / hidden_dim) ** transfer.
    """

    search_width: Count | None = None
    transfer: float = 0.5

    def check(self) -> None:
        super().check()
        if self.search_width is not None and len(set(self.learning_rates)) < 2:
            raise UserError(
                f"`learning_rates` must be at least two, for a grid that can grow at `search_width`; got"
                f" {self.learning_rates or 'none'}. Give more, or leave out `search_width`"
            )

    def transferred(self, rate: float, width: int) -> float:
        """A rate of the search for a model of another width, to three digits."""
        if self.search_width in (None, width):
            return rate
        return rounded(rate * (self.search_width / width) ** self.transfer)

    @property
    def about_search(self) -> str:
        """How the rates were found, in words."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        factor = f"{self.search_width} / width"
        if self.transfer != 1:
            factor = f"({factor}) ** {self.transfer:g}"
        growing = f" that grows by up to {self.beyond_grid} rates while the best is at its edge"
        return (
            f"chosen for each arm by the mean final loss on `select` of runs with width {self.search_width} and seeds"
            f" {seeds}, on a grid ({rates}){growing if self.beyond_grid else ''}; multiplied by {factor} for other"
            " widths"
        )


def rounded(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")


def tried(trainings: Iterable[Training]) -> Tried:
    """In the order of rates."""
    found: dict[float, list[float]] = {}
    for training in trainings:
        loss = training.select_loss
        is_finite = loss is not None and math.isfinite(loss)
        found.setdefault(training.learning_rate, []).append(loss if is_finite else math.inf)
    return {rate: statistics.fmean(found[rate]) for rate in sorted(found)}


def best(losses: Tried) -> float:
    """The rate with the lowest loss; the lower rate on ties."""
    return min(losses, key=lambda rate: losses[rate])


def at_edge(losses: Tried) -> bool:
    """Whether the best rate is the lowest or highest one, so that the optimum may be outside."""
    return best(losses) in (min(losses), max(losses))


def beyond(losses: Tried) -> float | None:
    """The next rate of a grid whose best is at an edge, with the ratio of that edge; None for a best inside.

    A rate of up to six digits is that number, without an error of rounding; others keep all digits.
    """
    if not at_edge(losses):
        return None
    first, second, *_ = sorted(losses, reverse=best(losses) == max(losses))
    rate = first * first / second
    short = float(f"{rate:.6g}")
    return short if math.isclose(short, rate, rel_tol=1e-12) else rate


def about_edges(found: Mapping[str, Tried]) -> str:
    """The arms whose best rate is at an edge, in words."""
    edges = [name for name, losses in found.items() if losses and at_edge(losses)]
    return f"Still at an edge: {', '.join(edges)}." if edges else "No chosen rate is at an edge."
