"""Recorded activations: a mapping from names to named arrays."""

from collections.abc import Iterator, Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from qkvflow.axes import LAYERS
from qkvflow.errors import UserError

Row = tuple[str, str, int | None]  # name; key; row in the array of that key, None for the whole array


class Cache(eqx.Module, Mapping):
    """name -> value, in the order of the forward pass. A pytree, so that it can be an argument or a result under jit,
    grad and vmap. Values of all steps are kept as the scan returns them, in one array per place.

    Attributes:
        arrays: key -> value, or values of several steps along a leading axis.
        rows: the location of each name.
    """

    arrays: dict[str, NamedArray]
    rows: tuple[Row, ...] = eqx.field(static=True)

    def __getitem__(self, name: str) -> NamedArray:
        for own, key, row in self.rows:
            if own == name:
                array = self.arrays[key]
                return array if row is None else _row(array, row)
        raise KeyError(f"{name!r} was not requested; available: {', '.join(self) or 'nothing'}")

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _, _ in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def stack(self, place: str) -> NamedArray:
        """The values of a place at all requested steps, {layers, ...}: `attn.pattern`, `1.attn.pattern` (of stage 1),
        `prelude.mlp.out`; for `state`, the initial state comes first if it was requested.

        Raises:
            UserError: a place that was not requested.
        """
        keys = [key for key in (f"{place}.0", place) if key in self.arrays]
        if place.endswith("state") and keys:
            first = [self.arrays[key].array[..., None, *_all(self.arrays[key])] for key in keys[:1] if key != place]
            arrays = [*first, *(self.arrays[key].array for key in keys if key == place)]
            names = self.arrays[keys[0]].axis_names
            names = names if keys[0] != place else names[1:]
            axis = -len(names) - 1
            return _named(jnp.concatenate(arrays, axis=axis), (LAYERS, *names))
        if place not in self.arrays or place in self:
            known = sorted({key for _, key, row in self.rows if row is not None})
            raise UserError(f"no steps of {place!r} were requested; available: {', '.join(known) or 'none'}.")
        return self.arrays[place]


def _row(stack: NamedArray, row: int) -> NamedArray:
    names = stack.axis_names[1:]
    return _named(stack.array[(..., row, *(slice(None),) * len(names))], names)


def _all(array: NamedArray) -> tuple[slice, ...]:
    return (slice(None),) * len(array.axis_names)


def _named(array, names: tuple[str, ...]) -> NamedArray:
    """With these as the last axes: under `jax.vmap` an array has further leading axes."""
    template = hax.named(np.zeros((1,) * len(names)), names)
    return jax.tree.unflatten(jax.tree.structure(template), [array])
