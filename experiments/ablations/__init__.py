"""Ablations: which part of a model does what, each part changed alone, over several seeds."""
