"""Gradient flow of the ODE flow hybrid: norms before clipping; solvers and control, on trained models."""
