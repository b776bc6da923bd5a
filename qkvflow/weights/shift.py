"""A vector that moves with layer-time: s(t) = lin2(silu(lin1(t))), {embed}; the time embedding of the flow hybrid.

The time itself is the only feature (fp32). Source: `ODEFunc.time_embed` (arXiv 2601.10007), a Linear(1, d), SiLU,
Linear(d, d).
"""

from haliax import Axis, NamedArray

from qkvflow.time import Time
from qkvflow.weights.base import TimeDependent
from qkvflow.weights.generated import TimeNetwork
from qkvflow.weights.scales import PRESETS


class TimeShift(TimeDependent):
    """Represents a vector {embed} that is a function of time."""

    net: TimeNetwork

    @staticmethod
    def init(Embed: Axis, *, key) -> "TimeShift":
        return TimeShift(TimeNetwork.init(Embed.size, 0, PRESETS["matched"], key=key, name=Embed.name))

    def at(self, t: Time) -> NamedArray:
        return self.net(t).astype(self.net.lin2.weight.dtype)

    def rate(self, t: Time) -> NamedArray:
        return self.net.rate(t).astype(self.net.lin2.weight.dtype)
