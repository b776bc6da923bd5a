"""Models and arrays of the official code (`tests/golden`)."""

import numpy as np

from qkvflow import official


def golden(name):
    arrays = np.load(f"tests/golden/{name}.npz")
    params = {k.removeprefix("param/"): arrays[k] for k in arrays if k.startswith("param/")}
    return official.load_gpt2(params, num_heads=4, steps=6), np.load("tests/golden/analysis.npz")
