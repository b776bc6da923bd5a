"""What is W(t)? Weights as functions of layer-time, and `at`, which evaluates them."""

from qkvflow.weights.base import TimeDependent as TimeDependent
from qkvflow.weights.base import at as at
from qkvflow.weights.base import evaluate as evaluate
from qkvflow.weights.config import ConstantConfig as ConstantConfig
from qkvflow.weights.config import GeneratedConfig as GeneratedConfig
from qkvflow.weights.config import PerLayerConfig as PerLayerConfig
from qkvflow.weights.config import WeightsConfig as WeightsConfig
from qkvflow.weights.generated import Generated as Generated
from qkvflow.weights.per_layer import PerLayer as PerLayer
from qkvflow.weights.shift import TimeShift as TimeShift
