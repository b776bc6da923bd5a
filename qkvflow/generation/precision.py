"""The precision of generation: W(t) is evaluated as in training, and rounded once."""

import jax
import jax.numpy as jnp
import numpy as np

from qkvflow.errors import UserError

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_LONG_NAMES = {"float32": "f32", "bfloat16": "bf16"}


def dtype_by_name(name: str):
    """`f32` or `bf16` (`float32`, `bfloat16`).

    Raises:
        UserError: another name.
    """
    short = _LONG_NAMES.get(name, name)
    if short not in _DTYPES:
        raise UserError(
            f"dtype must be one of {', '.join(_DTYPES)}, or left out for the dtype of the weights; got {name!r}"
        )
    return _DTYPES[short]


def cast(tree, dtype: str | None):
    """The pytree with its floating-point arrays in `dtype`; unchanged for None."""
    if dtype is None:
        return tree
    target = dtype_by_name(dtype)

    def rounded(leaf):
        is_float = isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(target) if is_float else leaf

    return jax.tree.map(rounded, tree)
