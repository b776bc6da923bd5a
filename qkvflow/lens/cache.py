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

Row = tuple[str, str, int | None]  # name; key; row of the array of that key, None if it is all of it


class Cache(eqx.Module, Mapping):
    """name -> value, in the order of the forward pass. A JAX tree, so that it may be an argument or a result under jit,
    grad and vmap. Values of all steps are kept as they come out of the scan, in one array for each place.

    Attributes:
        arrays: key -> value, or values of several steps along an axis in front.
        rows: where each name is.
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
        """The values of a place at all steps that were asked for, {layers, ...}: `attn.pattern`, `1.attn.pattern` (of
        stage 1), `prelude.mlp.out`; of `state` with the first one in front, if it was asked for.

        Raises:
            UserError: a place that was not asked for.
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
    """With these axes last: under `jax.vmap` an array has more than its names tell, in front."""
    template = hax.named(np.zeros((1,) * len(names)), names)
    return jax.tree.unflatten(jax.tree.structure(template), [array])
