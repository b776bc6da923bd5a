"""What is W(t)? Weights as functions of layer-time, and `at`, which evaluates them."""

from qkvflow.weights.base import TimeDependent as TimeDependent
from qkvflow.weights.base import at as at
from qkvflow.weights.base import evaluate as evaluate
from qkvflow.weights.base import evaluation_flops as evaluation_flops
from qkvflow.weights.base import rate as rate
from qkvflow.weights.bases import FunctionBasis as FunctionBasis
from qkvflow.weights.config import BasisConfig as BasisConfig
from qkvflow.weights.config import ConstantConfig as ConstantConfig
from qkvflow.weights.config import GeneratedConfig as GeneratedConfig
from qkvflow.weights.config import ModulatedConfig as ModulatedConfig
from qkvflow.weights.config import PerLayerConfig as PerLayerConfig
from qkvflow.weights.config import WeightsConfig as WeightsConfig
from qkvflow.weights.fitting import Fit as Fit
from qkvflow.weights.fitting import check_enough_layers as check_enough_layers
from qkvflow.weights.fitting import fit as fit
from qkvflow.weights.fitting import read_error as read_error
from qkvflow.weights.galerkin import Galerkin as Galerkin
from qkvflow.weights.galerkin import refine as refine
from qkvflow.weights.galerkin import refine_with_error as refine_with_error
from qkvflow.weights.galerkin import roughness as roughness
from qkvflow.weights.generated import Generated as Generated
from qkvflow.weights.modulated import Modulated as Modulated
from qkvflow.weights.per_layer import PerLayer as PerLayer
from qkvflow.weights.shift import TimeShift as TimeShift
from qkvflow.weights.variation import variation as variation
