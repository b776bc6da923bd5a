"""Names the axis along which outputs of time networks are sharded over devices.

Levanter shards parameters along `embed`. Time networks also generate vectors without `embed` (biases {heads, ...} and
{mlp}, and their gates), from arrays that are T or H times as long. There, the longest axis is called `features`.
"""

from haliax import Axis, NamedArray

from qkvflow.axes import EMBED, FEATURES


def named_for_division(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The same axes, the longest called `features` if none is `embed`."""
    if not axes or EMBED in {a.name for a in axes}:
        return axes
    longest = max(axes, key=lambda a: a.size)
    return tuple(Axis(FEATURES, a.size) if a == longest else a for a in axes)


def named_as(array: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
    """The inverse for an array with the axes `named_for_division(axes)`, and others."""
    names = {new.name: old.name for new, old in zip(named_for_division(axes), axes, strict=True) if new != old}
    return array.rename(names) if names else array
