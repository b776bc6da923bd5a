"""Continuous-depth language models: transformers whose depth is an ODE, dx/dt = B(x; W(t)).

Importing qkvflow registers the model `type: neuralode` with Levanter.
"""

from qkvflow.interrupts import leave_while_importing

leave_while_importing()

from qkvflow import models as models  # noqa: E402
from qkvflow.generation import generate as generate  # noqa: E402
from qkvflow_command import VERSION as __version__  # noqa: E402, F401
