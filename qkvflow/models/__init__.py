"""Models: points of weights x block x depth, as Levanter language models. Importing this registers `neuralode`."""

from qkvflow.models.config import ControlConfig as ControlConfig
from qkvflow.models.config import NeuralOdeConfig as NeuralOdeConfig
from qkvflow.models.config import is_flow as is_flow
from qkvflow.models.flow import Flow as Flow
from qkvflow.models.neuralode import NeuralOdeLMHeadModel as NeuralOdeLMHeadModel
