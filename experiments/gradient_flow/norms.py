"""Norms of gradients by component, and by which rules the seed and we call them healthy."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Component -> beginnings of the names of its parameters. The head is tied to the embeddings; the last norm counts to
# the coda. In the baseline `flow` is the layers that stand in its place.
COMPONENTS = {
    "embeddings": ("embeddings.", "lm_head."),
    "prelude": ("transformer.prelude.",),
    "flow": ("transformer.flow.",),
    "coda": ("transformer.coda.", "transformer.norm."),
}
VANISHING, EXPLODING = 1e-6, 100.0  # the seed's
RELATIVE = 1e-3  # ours: of the total norm of the same step
LOSS_RATIO, GRADIENT = 1.1, 0.01  # the seed's, see `Verdict`

_PREFIX = "grad/norm/"

# What is counted of the steps of a component. A comparison with nan is false, so nan counts as not finite alone.
RULES = {
    f"< {VANISHING:g}": lambda norm, total: norm < VANISHING,
    f"< {RELATIVE:g} of total": lambda norm, total: norm < RELATIVE * total,
    f"> {EXPLODING:g}": lambda norm, total: norm > EXPLODING,
    "not finite": lambda norm, total: not math.isfinite(norm),
}


def component_norms(record: Mapping[str, float]) -> dict[str, float]:
    """Norms by component, and `total`, from a record of `metrics.jsonl` that `trainer.watch` wrote: of a component the
    root of the sum of squares over its parameters.

    Raises:
        ValueError: if a parameter belongs to no component.
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
    """What is left of norms when the whole gradient is scaled down to `limit`: norm · min(1, limit / total)."""
    if not limit:
        return list(norms)
    return [norm * min(1.0, limit / total) if total else norm for norm, total in zip(norms, totals, strict=True)]


def counts(norms: Sequence[float], totals: Sequence[float]) -> list[int]:
    """In how many steps each of RULES holds."""
    return [sum(map(rule, norms, totals)) for rule in RULES.values()]


@dataclass(frozen=True)
class Verdict:
    """The rule by which the seed called the flow's gradients healthy, for one seed.

    Attributes:
        ratio: mean training loss over the last steps, of a model divided by that of the baseline.
        gradient: mean norm of the flow's gradient, after clipping as in the seed; None for a model without a flow.
    """

    ratio: float
    gradient: float | None

    @staticmethod
    def of(losses: Sequence[float], baseline: Sequence[float], norms: Sequence[float] | None, last: int) -> "Verdict":
        """By training losses and norms of the flow's gradient after clipping, both by step."""
        gradient = None if norms is None else statistics.fmean(norms)
        return Verdict(final(losses, last) / final(baseline, last), gradient)

    @property
    def passes(self) -> bool:
        return self.ratio < LOSS_RATIO and (self.gradient is None or self.gradient > GRADIENT)


def final(losses: Sequence[float], last: int) -> float:
    """Mean over the last steps."""
    return statistics.fmean(losses[-last:])
