"""Norms of gradients by component, and the published and this study's criteria for healthy norms."""

import math
from collections.abc import Mapping

import numpy as np

# Component -> prefixes of the names of its parameters. The head is tied to the embeddings; the last norm belongs to the
# coda. In the baseline `flow` means the layers in its place.
COMPONENTS = {
    "embeddings": ("embeddings.", "lm_head."),
    "prelude": ("transformer.prelude.",),
    "flow": ("transformer.flow.",),
    "coda": ("transformer.coda.", "transformer.norm."),
}
VANISHING, EXPLODING = 1e-6, 100.0  # published
RELATIVE = 1e-3  # this study's: fraction of the total norm of the same step
LOSS_RATIO, GRADIENT = 1.1, 0.01  # published, see `passes`

_PREFIX = "grad/norm/"

# Criteria for steps of a component, on arrays. Comparisons with nan are false, so nan only counts as not finite.
RULES = {
    f"< {VANISHING:g}": lambda norm, total: norm < VANISHING,
    f"< {RELATIVE:g} of total": lambda norm, total: (norm < RELATIVE * total) & ~np.isinf(total),
    f"> {EXPLODING:g}": lambda norm, total: norm > EXPLODING,
    "not finite": lambda norm, total: ~np.isfinite(norm),
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
        if name in (key, "total"):
            continue
        owner = next((c for c, beginnings in COMPONENTS.items() if name.startswith(beginnings)), None)
        if owner is None:
            raise ValueError(f"the parameter {name} belongs to no component")
        squares[owner] = squares.get(owner, 0.0) + value * value
    found = {name: math.sqrt(squares[name]) for name in COMPONENTS if name in squares}
    return found | {"total": record[f"{_PREFIX}total"]}


def clipped(norms: np.ndarray, totals: np.ndarray, limit: float | None) -> np.ndarray:
    """Norms after scaling the whole gradient down to `limit`: norm · min(1, limit / total)."""
    return norms * limit / np.maximum(totals, limit) if limit else norms


def passes(ratio: float, gradient: float | None) -> bool:
    """The published criterion for healthy gradients of the flow, for one seed.

    Args:
        ratio: mean training loss over the last steps, divided by that of the baseline.
        gradient: mean norm of the flow's gradient, after the published clipping; None for a model without a flow.
    """
    return ratio < LOSS_RATIO and (gradient is None or gradient > GRADIENT)
