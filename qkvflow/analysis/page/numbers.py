"""Numbers for JSON: few digits, None for non-finite values."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Data = dict[str, Any]
Step = Callable[[], None]


def rounded(array, digits: int | None = None) -> Any:
    """Nested lists of numbers with few digits (default: four significant); None for non-finite values."""
    flat = np.asarray(array, np.float64)
    text = (lambda x: round(x, digits)) if digits is not None else (lambda x: float(f"{x:.4g}"))
    if flat.ndim == 0:
        return text(float(flat)) if finite(float(flat)) else None
    if flat.ndim == 1:
        return [text(x) if finite(x) else None for x in flat.tolist()]
    return [rounded(row, digits) for row in flat]


def finite(x) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
