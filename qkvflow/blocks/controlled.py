"""A block with shifted input and scaled output: the vector field of the ODE flow hybrid.

    B_u(x; W, s, C, alpha) = alpha B(x + s + C u; W)

s: {embed}, the shift by layer-time (a function of t in the flow, see `qkvflow.weights.shift`);
C: {control} -> {embed}; u: the control, {..., control}, or None; alpha: a learned scale, 0.1 at first.
Source: `ODEFunc` of PeterJemley/Continuous-Depth-Transformers-with-Learned-Control-Dynamics (arXiv 2601.10007).
Differs from the source: C has no bias (s has one), so that no control equals zero control.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from haliax import Axis, NamedArray

from qkvflow.axes import CONTROL
from qkvflow.blocks.inputs import Inputs


class Controlled(eqx.Module):
    """B_u: {..., position, embed} -> {..., position, embed}."""

    block: eqx.Module
    shift: NamedArray  # {embed}
    control: hnn.Linear
    alpha: NamedArray  # {}

    @staticmethod
    def init(block: eqx.Module, Embed: Axis, dim: int, alpha: float, *, key) -> "Controlled":
        """Around `block`, with a zero shift."""
        control = hnn.Linear.init(Axis(CONTROL, dim), Embed, key=key, use_bias=False, out_first=False)
        return Controlled(block, hax.zeros(Embed), control, hax.full((), alpha))

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        return self.extend(x, inputs, None, key=key)[0]

    def extend(self, x: NamedArray, inputs: Inputs, memory, *, key=None):
        """B_u(x), and the memory of the block inside extended by the positions of x."""
        h = x + self.shift.astype(x.dtype)
        if inputs.control is not None:
            h = h + self.control(inputs.control.astype(x.dtype))
        h = inputs.see("shifted", h.rearrange(x.axes))
        dx, memory = self.block.extend(h, inputs, memory, key=key)
        return dx * self.alpha.astype(x.dtype), memory

    def memory(self, Batch: Axis, length: int, dtype):
        """An empty memory of the block inside."""
        return self.block.memory(Batch, length, dtype)
