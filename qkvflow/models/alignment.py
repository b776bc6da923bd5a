"""Aligns the layers of an ordinary stack by permutations, so that they lie on a smooth path.

What a layer computes does not depend on the order of its hidden units, nor on that of its heads and of the channels
within them (`qkvflow.models.head_order`). Neighbouring layers trained apart have nothing to do with each other's order.
Minimised over all of these orders P_l is

    sum_l || P_l W_l - P_{l-1} W_{l-1} ||^2

Each term depends on P_{l-1}^-1 P_l alone, so linear assignment for each pair of neighbours finds the least sum there
is; for queries that share keys, a local search finds a small one.
Sources: Ainsworth et al., Git Re-Basin (2022), which aligns two models; Singh & Jaggi, Model Fusion (2020).
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from scipy.optimize import linear_sum_assignment

from qkvflow.axes import HEAD_SIZE, HEADS, KV_HEAD, LAYERS, MLP
from qkvflow.models.head_order import order_heads, parts
from qkvflow.named import is_named, named_leaves
from qkvflow.weights import PerLayer


@dataclass(frozen=True)
class Roughness:
    """sum_l ||W_l - W_{l-1}||^2 over sum_l (||W_l||^2 + ||W_{l-1}||^2) / 2: 0 for equal layers, 2 for independent ones.

    Attributes:
        all: the sums over all arrays.
        by_array: of each array, by its name, such as `mlp.c_fc.weight`.
    """

    all: float
    by_array: dict[str, float]


def align(layers: PerLayer, step: Callable[[str], Any] = lambda name: None) -> PerLayer:
    """The same layers, GPT-2's or Llama's, with heads and hidden units permuted to be nearest to the layer before.

    Args:
        step: is told what is aligned next.
    """
    stacked = layers.blocks.stacked
    found = list(named_leaves(stacked))
    step(MLP)
    units = {_name(path): _front(array, LAYERS, MLP) for path, array in found if _has(array, MLP)}
    _order_units([copy for copy, _ in units.values()])
    step(HEADS)
    groups = min(array.axis_size(name) for _, array in found for name in (HEADS, KV_HEAD) if _has(array, name))
    heads = {_name(path): parts(path[-2].name, array, groups) for path, array in found if _has(array, HEAD_SIZE)}
    order_heads([part for *_, of_array in heads.values() for part in of_array])
    fronts = units | {name: (copy, axes) for name, (copy, axes, _) in heads.items()}

    def reordered(path, leaf):
        if not is_named(leaf) or _name(path) not in fronts:
            return leaf
        copy, axes = fronts[_name(path)]
        return hax.named(jnp.asarray(copy), axes).rearrange(leaf.axes)

    stacked = jax.tree_util.tree_map_with_path(reordered, stacked, is_leaf=is_named)
    return dataclasses.replace(layers, blocks=dataclasses.replace(layers.blocks, stacked=stacked))


def layer_roughness(layers: PerLayer) -> Roughness:
    """How far neighbouring layers are from each other; 0 for a single layer."""
    moved, size = {}, {}
    for path, array in named_leaves(layers.blocks.stacked):
        rows = [np.asarray(row, np.float64) for row in array.rearrange((LAYERS, ...)).array]
        name, pairs = _name(path), list(itertools.pairwise(rows))
        moved[name] = sum(float(np.sum((b - a) ** 2)) for a, b in pairs)
        size[name] = sum(float(np.sum(a**2) + np.sum(b**2)) / 2 for a, b in pairs)
    return Roughness(
        _ratio(sum(moved.values()), sum(size.values())), {name: _ratio(moved[name], size[name]) for name in moved}
    )


def _order_units(arrays: list[np.ndarray]) -> None:
    """Writes each layer in the order that is nearest to the one before it: [layers, units, ...]."""
    for k in range(1, len(arrays[0])):
        pairs = [np.asarray(array[k - 1 : k + 1], np.float32).reshape(2, array.shape[1], -1) for array in arrays]
        to = linear_sum_assignment(sum(before @ after.T for before, after in pairs), maximize=True)[1]
        for array in arrays:
            array[k] = array[k][to]


def _front(array: NamedArray, *axes: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """A copy that may be written into, with `axes` in front, and the names of its axes."""
    front = array.rearrange((*axes, ...))
    return np.array(front.array), tuple(axis.name for axis in front.axes)


def _has(array: NamedArray, axis: str) -> bool:
    return axis in {a.name for a in array.axes}


def _name(path) -> str:
    return ".".join(key.name for key in path)


def _ratio(moved: float, size: float) -> float:
    return moved / size if size else 0.0
