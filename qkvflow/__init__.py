"""Continuous-depth language models: transformers whose depth is an ODE, dx/dt = B(x; W(t)).

Importing qkvflow registers the model `type: neuralode` with Levanter.
"""

from qkvflow import models as models
from qkvflow.generation import generate as generate
