"""Linear maps as products of matrices, the form that XLA computes fast on a CPU.

- In generation, there is one row, and weights {embed, qkv, heads, head_size} are read number by number, column after
  column. As a matrix {embed, out} (`with_matrices`) they take 0.2 ms instead of 2.0 ms at width 512.
- In training, there are the rows {batch, position}, see `by_rows`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import physical_axis_name

from qkvflow.axes import QKV

_IN, _OUT = "matrix_in", "matrix_out"


class MatrixLinear(eqx.Module):
    """As `haliax.nn.Linear`.

    Attributes:
        weight: {matrix_in, matrix_out}; bias: {matrix_out}.
        In, Out: what these axes are made of.
    """

    weight: NamedArray
    bias: NamedArray | None
    In: tuple[Axis, ...] = eqx.field(static=True)
    Out: tuple[Axis, ...] = eqx.field(static=True)

    @staticmethod
    def of(linear: hnn.Linear) -> "MatrixLinear":
        In, Out = _axes(linear.In), _axes(linear.Out)
        weight = linear.weight * linear.reparam.active_scale
        weight = weight.rearrange((*In, *Out)).flatten_axes(In, _IN).flatten_axes(Out, _OUT)
        bias = None if linear.bias is None else linear.bias.rearrange(Out).flatten_axes(Out, _OUT)
        return MatrixLinear(weight, bias, In, Out)

    def __call__(self, x: NamedArray, *, key=None) -> NamedArray:
        y = hax.dot(x.flatten_axes(self.In, _IN), self.weight, axis=_IN)
        y = y if self.bias is None else y + self.bias
        return hax.auto_sharded(y.unflatten_axis(_OUT, self.Out))


class PartedLinear(eqx.Module):
    """A fused linear map with a matrix for its first part and one for all others: queries are not computed where only
    keys and values are kept.

    Attributes:
        Out: as of the fused one, the axis of the parts in front.
    """

    first: MatrixLinear
    others: MatrixLinear
    Out: tuple[Axis, ...] = eqx.field(static=True)

    @staticmethod
    def of(linear: hnn.Linear) -> "PartedLinear":
        Out = _axes(linear.Out)
        name, Rest = Out[0].name, Out[0].resize(Out[0].size - 1)

        def part(which: int | slice, Out: Sequence[Axis]) -> MatrixLinear:
            bias = None if linear.bias is None else linear.bias[name, which]
            return MatrixLinear.of(dataclasses.replace(linear, weight=linear.weight[name, which], bias=bias, Out=Out))

        return PartedLinear(part(0, Out[1:]), part(slice(1, None), (Rest, *Out[1:])), Out)

    def __call__(self, x: NamedArray) -> tuple[NamedArray, ...]:
        """One array for each part."""
        return self.first(x), *self.others(x).unbind(self.Out[0].name)


def by_rows(linear: Callable[[NamedArray], NamedArray], x: NamedArray) -> NamedArray:
    """linear(x), {..., In} -> {..., Out}, with all axes of x but its last, In, as one.

    The gradient of the weights then contracts one axis. Where it contracts {batch, position}, XLA on a CPU transposes a
    factor first and reads both along their rows, which takes twice as long. x stays as it is where devices divide
    another axis than its first: merged, that division would be lost.
    """
    rows = x.axes[:-1]
    if len(rows) < 2 or any(physical_axis_name(axis) for axis in rows[1:]):
        return linear(x)
    first = rows[0].name  # keeps its division between devices
    return linear(x.flatten_axes(rows, first)).unflatten_axis(first, rows)


def with_matrices(tree, parted: bool = False):
    """The pytree with matrices in place of all linear maps between more than two axes.

    Args:
        parted: two for those that are fused (see `PartedLinear`), which is slower where all parts are read.
    """

    def changed(node):
        if not _is_linear(node) or node.weight.ndim <= 2:
            return node
        return PartedLinear.of(node) if parted and _axes(node.Out)[0].name == QKV else MatrixLinear.of(node)

    return jax.tree.map(changed, tree, is_leaf=_is_linear)


def _is_linear(node) -> bool:
    return type(node) is hnn.Linear


def _axes(spec: Axis | Sequence[Axis]) -> tuple[Axis, ...]:
    return (spec,) if isinstance(spec, Axis) else tuple(spec)
