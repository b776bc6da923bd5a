"""The product e.P that generates W(t), with a hand-written backward pass for speed: it moves gigabytes.

    W[l, ...] = sum_t e[l, t] P[t, ...],   dP[t, ...] = sum_l e[l, t] dW[l, ...],   de[l, t] = <P[t], dW[l]>

P has T times the size of a block and is by far the largest array of a model, while there are only a few times l. So
each of the three is bound by reading or writing P once. JAX's automatic derivative takes 4 to 10 times as long on a
CPU: it computes dP with t as the last axis and transposes it, and it contracts de along the wrong side. Measured, with
the alternatives, in docs/depth.md. Nothing is flattened, so the named axes keep their sharding.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import lax

from qkvflow.axes import TIME_EMBED

_BOTH_MODES = ContextVar("both_modes", default=False)


def project(e: NamedArray, projection: NamedArray) -> NamedArray:
    """e.P: {[layers,] time_embed} and {time_embed, axes of W} -> {[layers,] axes of W}, in the dtype of P.

    Differentiable in reverse mode, any number of times; within `both_modes` in forward mode too.
    """
    e, projection = e.rearrange((..., TIME_EMBED)), projection.rearrange((TIME_EMBED, ...))
    product = _plain if _BOTH_MODES.get() else _product
    array = product(e.array.astype(projection.dtype), projection.array)
    return hax.named(array, (*e.axes[:-1], *projection.axes[1:]))


@contextlib.contextmanager
def both_modes() -> Iterator[None]:
    """Traces products without the hand-written backward pass, which has no forward mode (`jax.jvp`, `jax.jacfwd`)."""
    token = _BOTH_MODES.set(True)
    try:
        yield
    finally:
        _BOTH_MODES.reset(token)


def _plain(e, p):
    return lax.dot_general(e, p, (((e.ndim - 1,), (0,)), ((), ())))


@jax.custom_vjp
def _product(e, p):
    if e.ndim == 1:
        # Two equal rows instead of one: XLA's matrix times matrix uses all cores of a CPU, vector times matrix one.
        return lax.dot_general(jnp.broadcast_to(e, (2, *e.shape)), p, (((1,), (0,)), ((), ())))[0]
    return lax.dot_general(e, p, (((1,), (0,)), ((), ())))


def _forward(e, p):
    return _product(e, p), (e, p)


def _backward(residuals, dw):
    e, p = residuals
    inner = tuple(range(1, p.ndim))
    if e.ndim == 1:
        # An outer product is fused into the sum over the steps of a scan; a matrix product is not.
        return jnp.tensordot(p, dw, dw.ndim), e.reshape(-1, *(1,) * dw.ndim) * dw[None]
    de = lax.dot_general(p, jnp.moveaxis(dw, 0, -1), ((inner, tuple(range(dw.ndim - 1))), ((), ())))
    return de.T, lax.dot_general(e, dw, (((0,), (0,)), ((), ())))


_product.defvjp(_forward, _backward)
