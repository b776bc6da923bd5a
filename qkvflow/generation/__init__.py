"""Generation: text from a trained model, token by token, with a cache of earlier positions."""

from qkvflow.generation.drafting import Drafted as Drafted
from qkvflow.generation.drafting import Drafting as Drafting
from qkvflow.generation.engine import Engine as Engine
from qkvflow.generation.generate import generate as generate
from qkvflow.generation.sampling import ExitConfig as ExitConfig
from qkvflow.generation.sampling import SamplingOptions as SamplingOptions
