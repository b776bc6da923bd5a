"""Norms of gradients by component, and the seed's and this study's criteria for healthy norms."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Component -> prefixes of the names of its parameters. The head is tied to the embeddings; the last norm belongs to the
# coda. In the baseline `flow` means the layers in its place.
COMPONENTS = {
    "embeddings": ("embeddings.", "lm_head."),
    "prelude": ("transformer.prelude.",),
    "flow": ("transformer.flow.",),
    "coda": ("transformer.coda.", "transformer.norm."),
}
VANISHING, EXPLODING = 1e-6, 100.0  # the seed's
RELATIVE = 1e-3  # this study's: fraction of the total norm of the same step
LOSS_RATIO, GRADIENT = 1.1, 0.01  # the seed's, see `Verdict`

_PREFIX = "grad/norm/"

# Criteria counted over the steps of a component. Comparisons with nan are false, so nan only counts as not finite.
RULES = {
    f"< {VANISHING:g}": lambda norm, total: norm < VANISHING,
    f"< {RELATIVE:g} of total": lambda norm, total: norm < RELATIVE * total,
    f"> {EXPLODING:g}": lambda norm, total: norm > EXPLODING,
    "not finite": lambda norm, total: not math.isfinite(norm),
}


def component_norms(record: Mapping[str, float]) -> dict[str, float]:
    """Norms by component, and `total`, from a record of `metrics.jsonl` that `trainer.watch` wrote; for a component,
    the root of the sum of squares over its parameters.

    Raises:
        ValueError: a parameter belongs to no component.
    """
    squares: dict[str, float] = {}
    for key, value in record.items():
        name = key.removeprefix(_PREFIX)
        if name == key or name == "total":
            continue
        owner = next((c for c, beginnings in COMPONENTS.items() if name.startswith(beginnings)), None)
        if owner is None:
            raise ValueError(f"the parameter {name} belongs to no component")
        squares[owner] = squares.get(owner, 0.0) + value * value
    found = {name: math.sqrt(squares[name]) for name in COMPONENTS if name in squares}
    return found | {"total": record[f"{_PREFIX}total"]}


def clipped(norms: Sequence[float], totals: Sequence[float], limit: float | None) -> list[float]:
    """Norms after scaling the whole gradient down to `limit`: norm · min(1, limit / total)."""
    if not limit:
        return list(norms)
    return [norm * min(1.0, limit / total) if total else norm for norm, total in zip(norms, totals, strict=True)]


def counts(norms: Sequence[float], totals: Sequence[float]) -> list[int]:
    """The number of steps in which each of RULES holds."""
    return [sum(map(rule, norms, totals)) for rule in RULES.values()]


@dataclass(frozen=True)
class Verdict:
    """The seed's criterion for healthy gradients of the flow, for one seed.

    Attributes:
        ratio: mean training loss over the last steps, divided by that of the baseline.
        gradient: mean norm of the flow's gradient, after the seed's clipping; None for a model without a flow.
    """

    ratio: float
    gradient: float | None

    @staticmethod
    def of(losses: Sequence[float], baseline: Sequence[float], norms: Sequence[float] | None, last: int) -> "Verdict":
        """From training losses and norms of the flow's gradient after clipping, both by step."""
        gradient = None if norms is None else statistics.fmean(norms)
        return Verdict(final(losses, last) / final(baseline, last), gradient)

    @property
    def passes(self) -> bool:
        return self.ratio < LOSS_RATIO and (self.gradient is None or self.gradient > GRADIENT)


def final(losses: Sequence[float], last: int) -> float:
    """The mean over the last steps."""
    return statistics.fmean(losses[-last:])
