"""Continuity: flows whose W(t) is smooth, or that are trained on many grids, read at depths that they never saw."""
