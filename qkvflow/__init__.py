"""Continuous-depth language models: transformers whose depth is an ODE, dx/dt = B(x; W(t)).

Importing qkvflow registers the model `type: neuralode` with Levanter.
"""

import importlib

from qkvflow.interrupts import imports_begin

imports_begin()

from qkvflow import models as models  # noqa: E402
from qkvflow.generation import generate as generate  # noqa: E402
from qkvflow_command import VERSION as __version__  # noqa: E402, F401


def __getattr__(name: str):
    """`qkvflow.lens`, which programs do not need, is imported when it is asked for."""
    if name == "lens":
        return importlib.import_module("qkvflow.lens")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
