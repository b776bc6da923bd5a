"""YAML `weights:` the choices for W(t). Each builds a time-dependent block from an ordinary one."""

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import draccus
import jax

from qkvflow.errors import UserError
from qkvflow.ranges import Count, NotNegative, Positive, Range, Share, check_ranges
from qkvflow.time import TIME_SCALE
from qkvflow.weights.bases import FunctionBasis
from qkvflow.weights.galerkin import TIME_SHARES, expand
from qkvflow.weights.generated import generate
from qkvflow.weights.modulated import GATES, modulate
from qkvflow.weights.per_layer import PerLayer
from qkvflow.weights.scales import PRESETS, GeneratedScales


@dataclass(frozen=True)
class WeightsConfig(draccus.ChoiceRegistry, abc.ABC):
    """What W(t) is."""

    def __post_init__(self):
        check_ranges(self)

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
    """A time network generates each weight (the paper's model). T = time_embed_dim, S = sinusoidal_dim.

    Attributes:
        time_embed_dim: T, the size of the time embedding e(t) from which all weights are projected.
        sinusoidal_dim: S, the number of frequencies of the features that the time network sees.
        init: `matched`, W(t) starts with the scale of the ordinary layer, or `official`, as the paper's code.
        frozen_time: null, or a fixed time in [0, 1] at which weights are generated for every t (an ablation without
            time).
        time_scale: c of the features t, sin(c t w_k), cos(c t w_k), w_k = 10000^(-k/S); 1000 in the paper. 3.14159 with
            S = 1 gives t, sin(pi t), cos(pi t): weights that are smooth in time.
    """

    time_embed_dim: Count = 20
    sinusoidal_dim: Count = 128
    init: str = "matched"
    frozen_time: Share | None = None
    time_scale: Positive = TIME_SCALE

    def __post_init__(self):
        super().__post_init__()
        if self.init not in PRESETS:
            raise UserError(f"init: {self.init!r} is not known. Choices: {', '.join(PRESETS)}.")

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        del times  # generated weights exist at every t
        k_block, k_generate = jax.random.split(key)
        block = init_block(key=k_block)
        size = self.time_embed_dim, self.sinusoidal_dim
        return generate(block, *size, self.scales, self.frozen_time, self.time_scale, key=k_generate)

    @property
    def evaluate(self) -> str:
        return "batched"

    @property
    def scales(self) -> GeneratedScales:
        return PRESETS[self.init]


@WeightsConfig.register_subclass("modulated")
@dataclass(frozen=True)
class ModulatedConfig(WeightsConfig):
    """One block shared by all depths, multiplied by time-dependent gates. H = hidden_dim, S = sinusoidal_dim of the
    gate networks.

    Attributes:
        hidden_dim: hidden units of the gate networks.
        gate: `sigmoid`, or `film`, 1 + tanh, which starts as `constant` weights exactly.
        sinusoidal_dim: frequencies of the time features of the gate networks.
        frozen_time: null, or a fixed time in [0, 1] at which the gates are evaluated for every t (an ablation without
            time).
        time_scale: as that of `generated`.
    """

    hidden_dim: Count = 64
    gate: str = "sigmoid"
    frozen_time: Share | None = None
    sinusoidal_dim: Count = 32
    time_scale: Positive = TIME_SCALE

    def __post_init__(self):
        super().__post_init__()
        if self.gate not in GATES:
            raise UserError(f"gate: {self.gate!r} is not known. Choices: {', '.join(GATES)}.")

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        del times  # modulated weights exist at every t
        k_block, k_gates = jax.random.split(key)
        size = self.hidden_dim, self.sinusoidal_dim
        return modulate(init_block(key=k_block), *size, self.gate, self.frozen_time, self.time_scale, key=k_gates)

    @property
    def evaluate(self) -> str:
        return "in_scan"


@WeightsConfig.register_subclass("basis")
@dataclass(frozen=True)
class BasisConfig(WeightsConfig):
    """Each weight is a combination of K = `dim` fixed functions of time: no time network, K layers of parameters.

    Attributes:
        basis: chebyshev, cosine (smooth everywhere), spline (cubic), linear (hat functions), piecewise (K equal
            intervals).
        dim: K, the number of functions.
        init: `matched`, the variance of the ordinary layer at all times (within 10 %; exactly for piecewise), nine
            tenths of it common to them; `independent`, that variance with nothing common to all times: piecewise
            weights start as K independent layers, and the variance of others varies in time (0.67 to 1.33 of the
            ordinary one for linear and spline, 0.36 to 1.64 for chebyshev and cosine).
        smoothness_weight: training adds this times the integral of ||dW/dt||^2 to the loss
            (`qkvflow.weights.roughness`).
    """

    basis: str = "chebyshev"
    dim: Annotated[int, Range(at_least=1, at_most=512)] = 4
    init: str = "matched"
    smoothness_weight: NotNegative = 0.0

    def __post_init__(self):
        super().__post_init__()
        FunctionBasis(self.basis, self.dim)  # refuses unknown ones
        if self.init not in TIME_SHARES:
            raise UserError(f"init: {self.init!r} is not known. Choices: {', '.join(TIME_SHARES)}.")
        if self.init == "independent" and self._needs_common_part:
            raise UserError(
                f"init: independent with two {self.basis} functions, of which one is constant, gives weights that are"
                " zero at t = 1/2. Use init: matched, more functions, or basis: linear."
            )
        if self.smoothness_weight and self.basis == "piecewise":
            raise UserError(
                "smoothness_weight needs weights with a derivative in time, but piecewise weights jump: use another"
                " basis, or leave it out."
            )

    def refined(self, dim: int) -> "BasisConfig":
        """The configuration of the same weights in a basis of `dim` functions (`qkvflow.weights.refine`)."""
        fine = dataclasses.replace(self, dim=dim, init="matched")  # which every basis can have; nothing is drawn
        return fine if fine._needs_common_part else dataclasses.replace(fine, init=self.init)

    @property
    def _needs_common_part(self) -> bool:
        """Two functions, one of them constant and the other zero at t = 1/2: what is not constant is zero there."""
        return self.dim == 2 and self.basis in ("chebyshev", "cosine")

    def build(self, init_block: Callable, times: tuple[float, ...], *, key):
        k_block, k_expand = jax.random.split(key)
        # A grid of left end points starts at 0, where a time between two pieces belongs to the right one.
        basis = FunctionBasis(self.basis, self.dim, right_closed=times[0] > 0.0)
        return expand(init_block(key=k_block), basis, TIME_SHARES[self.init], key=k_expand)

    @property
    def evaluate(self) -> str:
        return "batched"


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
