"""One axis of what time networks make gets a name by which it is divided over devices.

Levanter divides parameters along `embed`. A time network makes vectors without it too (biases {heads, ...} and {mlp},
gates of these), from arrays that are T or H times as long. Their longest axis is called `features` there.
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
