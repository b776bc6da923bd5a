"""How much weights vary with layer-time: one number per array, which shows whether the model uses time at all."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from qkvflow.axes import LAYERS
from qkvflow.named import named_leaves
from qkvflow.time import grid
from qkvflow.weights.base import TimeDependent


def variation(module, times: tuple[float, ...]) -> dict[str, float]:
    """v(W) = sqrt(mean_t |W(t) - mean W|^2) / |mean W| for each array W of the time-dependent parts of `module`.

    Args:
        times: float in [0, 1]; t and mean run over them. Per-layer weights exist at their own times only.

    Returns:
        name of the array, such as `attn.c_attn.weight` -> v. 0 for an array that is the same at all times; infinity
        for one that changes around zero. Arrays that do not depend on time have no entry.
    """
    is_part = lambda x: isinstance(x, TimeDependent)  # noqa: E731
    found = {}
    for path, part in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_part):
        if not is_part(part):
            continue
        # One part at a time: only its weights at all times are in memory at once.
        for inner, array in named_leaves(part.at(grid(times))):
            name = ".".join(key.name for key in (*path, *inner))
            found[name] = float(_relative_spread(array))
    return found


@jax.jit
def _relative_spread(array: NamedArray):
    array = array.astype(jnp.float32)
    # Relative to the first, so that an array that does not change gives exactly 0.
    first = array[LAYERS, 0]
    change = array - first
    mean_change = hax.mean(change, LAYERS)
    spread = hax.mean(hax.sum(hax.square(change - mean_change), first.axes)).array
    norm = hax.sum(hax.square(first + mean_change)).array
    return jnp.where(spread == 0, 0.0, jnp.sqrt(spread / norm))
