"""Is a trained flow a solution of its ODE? The readings of `qkvflow.models.continuity`, beside the other analyses."""

from qkvflow.models.continuity import MARGIN, Continuity, Reading, continuity, table, ways

__all__ = ["MARGIN", "Continuity", "Reading", "continuity", "table", "ways"]
