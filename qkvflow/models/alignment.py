"""Aligns the layers of an ordinary stack by permutations, so that they lie on a smooth path.

What a layer computes does not depend on the order of its hidden units, nor on that of its heads: heads of keys and
values move with the query heads that read them, and those may change places among themselves. Neighbouring layers
trained apart have nothing to do with each other's order. Minimised over all of these orders P_l is

    sum_l || P_l W_l - P_{l-1} W_{l-1} ||^2

Each term depends on P_{l-1}^-1 P_l alone, so one linear assignment for each pair of neighbours finds the least sum
there is. Sources: Ainsworth et al., Git Re-Basin (2022), which aligns two models; Singh & Jaggi, Model Fusion (2020).
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from scipy.optimize import linear_sum_assignment

from qkvflow.axes import HEADS, KV_HEAD, LAYERS, MLP
from qkvflow.named import map_named, named_leaves
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
    """The same layers, GPT-2's or Llama's, each in the order that is nearest to that of the layer before it.

    Args:
        step: is told what is aligned next.
    """
    stacked = layers.blocks.stacked
    names = {axis.name for _, array in named_leaves(stacked) for axis in array.axes}
    groups, members = (KV_HEAD, HEADS) if KV_HEAD in names else (HEADS, None)
    for units, inside in ((MLP, None), (groups, members)):
        step(units)
        for axis, orders in _orders(stacked, units, inside).items():
            stacked = _reordered(stacked, axis, orders)
    return dataclasses.replace(layers, blocks=dataclasses.replace(layers.blocks, stacked=stacked))


def layer_roughness(layers: PerLayer) -> Roughness:
    """How far neighbouring layers are from each other; 0 for a single layer."""
    moved, size = {}, {}
    for path, array in named_leaves(layers.blocks.stacked):
        rows = [np.asarray(row, np.float64) for row in array.rearrange((LAYERS, ...)).array]
        name, pairs = ".".join(key.name for key in path), list(itertools.pairwise(rows))
        moved[name] = sum(float(np.sum((b - a) ** 2)) for a, b in pairs)
        size[name] = sum(float(np.sum(a**2) + np.sum(b**2)) / 2 for a, b in pairs)
    return Roughness(
        _ratio(sum(moved.values()), sum(size.values())), {name: _ratio(moved[name], size[name]) for name in moved}
    )


def _orders(stacked, units: str, inside: str | None) -> dict[str, np.ndarray]:
    """For the axis `units`, and for `inside`, whose places belong to those of `units` in equal shares: which of its
    places each layer has where, [layers, places]."""
    outer = [_rows(array, units) for array in _having(stacked, units)]
    inner = [_rows(array, inside) for array in _having(stacked, inside)] if inside else []
    layers, count = outer[0].shape[:2]
    share = inner[0].shape[1] // count if inner else 1
    orders, inside_orders = [np.arange(count)], [np.arange(count * share)]
    for k in range(1, layers):
        score = sum(rows[k - 1] @ rows[k].T for rows in outer)
        within = np.zeros((count, count, share), int)
        if inner:
            likeness = sum(rows[k - 1] @ rows[k].T for rows in inner).reshape(count, share, count, share)
            for i, j in np.ndindex(count, count):
                within[i, j] = linear_sum_assignment(likeness[i, :, j], maximize=True)[1]
                score[i, j] += likeness[i, np.arange(share), j, within[i, j]].sum()
        to = linear_sum_assignment(score, maximize=True)[1]
        to_inside = (to[:, None] * share + within[np.arange(count), to]).reshape(-1)
        orders.append(to[orders[-1]])
        inside_orders.append(to_inside[inside_orders[-1]])
    found = {units: np.stack(orders)}
    return found | ({inside: np.stack(inside_orders)} if inside else {})


def _having(stacked, axis: str) -> list[NamedArray]:
    return [array for _, array in named_leaves(stacked) if axis in {a.name for a in array.axes}]


def _rows(array: NamedArray, axis: str) -> np.ndarray:
    """[layers, places of the axis, the rest]; a sum of products over the rest says how alike two places are."""
    named = array.rearrange((LAYERS, axis, ...)).array
    return np.asarray(named, np.float32).reshape(*named.shape[:2], -1)


def _reordered(stacked, axis: str, orders: np.ndarray):
    def reorder(array: NamedArray) -> NamedArray:
        if axis not in {a.name for a in array.axes}:
            return array
        front = array.rearrange((LAYERS, axis, ...))
        moved = np.take_along_axis(np.asarray(front.array), orders.reshape(*orders.shape, *[1] * (front.ndim - 2)), 1)
        return hax.named(jnp.asarray(moved), front.axes).rearrange(array.axes)

    return map_named(reorder, stacked)


def _ratio(moved: float, size: float) -> float:
    return moved / size if size else 0.0
