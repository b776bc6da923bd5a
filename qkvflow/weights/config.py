"""YAML `weights:` the choices for W(t), each of which builds a time-dependent block from an ordinary one."""

import abc
from collections.abc import Callable
from dataclasses import dataclass

import draccus
import jax

from qkvflow.errors import UserError
from qkvflow.weights.generated import generate
from qkvflow.weights.per_layer import PerLayer
from qkvflow.weights.scales import PRESETS, GeneratedScales


@dataclass(frozen=True)
class WeightsConfig(draccus.ChoiceRegistry, abc.ABC):
    """What W(t) is."""

    @abc.abstractmethod
    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        """The time-dependent block. `init_block(key=...)` draws an ordinary block; `times` are those of the solver."""

    @property
    @abc.abstractmethod
    def evaluate(self) -> str:
        """What `depth.evaluate: auto` means for these weights: `batched` or `in_scan`."""

    @property
    def scales(self) -> GeneratedScales:
        """Initial scales, also of the embeddings and the head around the flow."""
        return PRESETS["matched"]


@WeightsConfig.register_subclass("generated")
@dataclass(frozen=True)
class GeneratedConfig(WeightsConfig):
    """Each weight is produced by a time network (the paper). T = time_embed_dim, S = sinusoidal_dim."""

    time_embed_dim: int = 20
    sinusoidal_dim: int = 128
    init: str = "matched"

    def __post_init__(self):
        for name in ("time_embed_dim", "sinusoidal_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.init not in PRESETS:
            raise UserError(f"init: {self.init!r} is not known. Choices: {', '.join(PRESETS)}.")

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        del times  # generated weights exist at every t
        k_block, k_generate = jax.random.split(key)
        block = init_block(key=k_block)
        return generate(block, self.time_embed_dim, self.sinusoidal_dim, self.scales, key=k_generate)

    @property
    def evaluate(self) -> str:
        return "batched"

    @property
    def scales(self) -> GeneratedScales:
        return PRESETS[self.init]


@WeightsConfig.register_subclass("constant")
@dataclass(frozen=True)
class ConstantConfig(WeightsConfig):
    """The same weights at every t: an autonomous ODE."""

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        del times
        return init_block(key=key)

    @property
    def evaluate(self) -> str:
        return "in_scan"


@WeightsConfig.register_subclass("per_layer")
@dataclass(frozen=True)
class PerLayerConfig(WeightsConfig):
    """Independent weights for each time of the grid: an ordinary transformer."""

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        return PerLayer.init(init_block, times, key=key)

    @property
    def evaluate(self) -> str:
        return "batched"
