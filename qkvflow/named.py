"""Trees whose leaves are named arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from haliax import NamedArray
from haliax.util import is_named_array as is_named  # for `is_leaf=is_named`

__all__ = ["is_named", "map_named", "named_leaves"]


def map_named(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of each named array of a tree (and of those in its place in further trees); other leaves stay."""
    return jax.tree.map(lambda leaf, *more: function(leaf, *more) if is_named(leaf) else leaf, *trees, is_leaf=is_named)


def named_leaves(tree: Any) -> Iterator[tuple[tuple, NamedArray]]:
    """The named arrays of a tree, each with its path (of JAX's keys)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_named(leaf):
            yield path, leaf
