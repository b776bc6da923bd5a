"""Continuity: flows with smooth W(t), or trained on many grids, evaluated at depths not seen in training."""
