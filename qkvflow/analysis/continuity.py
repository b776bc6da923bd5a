"""Is a trained flow a solution of its ODE? The measures of `qkvflow.models.continuity`, for analysis."""

from qkvflow.models.continuity import MARGIN, Continuity, Reading, continuity, table, ways

__all__ = ["MARGIN", "Continuity", "Reading", "continuity", "table", "ways"]
