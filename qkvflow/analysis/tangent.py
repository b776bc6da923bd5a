"""Perturbations of a trajectory: v_{k+1} = D Phi_k v_k with Phi_k = id + Psi_k, by Jacobian-vector products.

No Jacobian is formed. A set of m perturbations is an array [m, position, embed]; only it and the states are stored.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from qkvflow.analysis.reading import Reading, trajectory
from qkvflow.axes import EMBED, POSITION

_AT_ONCE = 8  # perturbations that pass through the block together; more use more memory
_TOGETHER = 64  # perturbations in one call


class Tangent:
    """The linearised steps along the trajectory of one sequence."""

    def __init__(self, reading: Reading, tokens: NamedArray, states: jax.Array | None = None):
        """
        Args:
            states: [steps + 1, position, embed], a trajectory other than that of `reading`.
        """
        self.reading = reading
        self.steps = reading.steps
        self.states = trajectory(reading, tokens).array if states is None else states
        self.shape = self.states.shape[1:]
        self.size = self.shape[0] * self.shape[1]

    def forward(self, k: int, v: jax.Array) -> jax.Array:
        """D Phi_k v. [m, position, embed] -> the same."""
        return _forward(self.reading, jnp.asarray(k), self.states[k], jnp.asarray(v, self.states.dtype))

    def backward(self, k: int, u: jax.Array) -> jax.Array:
        """(D Phi_k)^T u. [m, position, embed] -> the same."""
        return _backward(self.reading, jnp.asarray(k), self.states[k], jnp.asarray(u, self.states.dtype))

    def through(self, v) -> jax.Array:
        """D Phi v of the whole flow."""
        return functools.reduce(lambda v, k: self.forward(k, v), range(self.steps), jnp.asarray(v))

    def back_through(self, u) -> jax.Array:
        """(D Phi)^T u of the whole flow."""
        return functools.reduce(lambda u, k: self.backward(k, u), reversed(range(self.steps)), jnp.asarray(u))

    def jacobian_rows(self, k: int, position: int, state: int | None = None) -> jax.Array:
        """d Psi_k(x)_{position, :} / d x: [embed_out, position, embed_in], at the state before step k, or `state`."""
        x = self.states[k if state is None else state]
        return _rows(self.reading, jnp.asarray(k), x, jnp.asarray(position))

    def traces(self, probes: int | None = None, seed: int = 0) -> np.ndarray:
        """h tr(d F_n / d x) at the beginning of each step, [steps]: exact, with one product per dimension, or
        Hutchinson's estimate with `probes` random sign vectors (unbiased; the error falls as 1/sqrt(probes))."""
        count = self.size if probes is None else probes
        total, rng = np.zeros(self.steps), np.random.default_rng(seed)
        for first in range(0, count, _TOGETHER):
            now = np.arange(first, min(first + _TOGETHER, count))
            if probes is None:
                v = np.zeros((len(now), self.size), np.float32)
                v[np.arange(len(now)), now] = 1.0
            else:
                v = rng.choice(np.array([-1.0, 1.0], np.float32), (len(now), self.size))
            rows = jnp.asarray(v.reshape(-1, *self.shape), self.states.dtype)
            for k in range(self.steps):
                pushed = np.asarray(_field_products(self.reading, jnp.asarray(k), self.states[k], rows), np.float64)
                total[k] += np.sum(pushed.reshape(v.shape) * v)
        return self.reading.step * total / (1 if probes is None else probes)


@eqx.filter_jit
def _field_products(reading: Reading, k, x, v):
    push = _push(reading, lambda x: reading.field(k, hax.named(x, (POSITION, EMBED))).array, x)
    return jax.lax.map(push, v, batch_size=_AT_ONCE)


@eqx.filter_jit
def _forward(reading: Reading, k, x, v):
    return jax.lax.map(_push(reading, _step(reading, k), x), v, batch_size=_AT_ONCE)


@eqx.filter_jit
def _backward(reading: Reading, k, x, u):
    _, pull = jax.vjp(_step(reading, k), x)
    return jax.lax.map(lambda row: pull(row)[0], u, batch_size=_AT_ONCE)


@eqx.filter_jit
def _rows(reading: Reading, k, x, position):
    def at_position(x):
        return reading.increment(k, hax.named(x, (POSITION, EMBED))).array[position]

    value, pull = jax.vjp(at_position, x)
    return jax.lax.map(lambda row: pull(row)[0], jnp.eye(value.size, dtype=x.dtype), batch_size=_AT_ONCE)


def _push(reading: Reading, function, x):
    """v -> (d function / d x) v. One linearisation for all v: the function is evaluated only once."""
    if reading.differentiates_forward:
        return jax.linearize(function, x)[1]
    _, pull = jax.vjp(function, x)
    _, push = jax.vjp(lambda u: pull(u)[0], jnp.zeros_like(x))  # the transpose of the transpose
    return lambda v: push(v)[0]


def _step(reading: Reading, k):
    return lambda x: x + reading.increment(k, hax.named(x, (POSITION, EMBED))).array
