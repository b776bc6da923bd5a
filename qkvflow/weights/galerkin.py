"""`weights: basis`: every weight is a combination of fixed functions of time, W(t) = sum_k phi_k(t) C_k.

C: {basis, axes of W}, for every array of the block, norms and biases included; phi_k: `qkvflow.weights.bases`. There is
no time network: parameters and optimizer memory are K times those of one layer, and W(t) is as smooth as the phi_k.
Sources: Galerkin weights of Massaroli et al., Dissecting Neural ODEs (2020), section 3; Queiruga et al., Stateful
ODE-Nets using Basis Function Expansions (2021).
"""

import dataclasses
import warnings

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from qkvflow.axes import BASIS, TIME_EMBED
from qkvflow.errors import Notice, UserError
from qkvflow.named import is_named, map_named
from qkvflow.time import Time, on_time
from qkvflow.weights.base import TimeDependent, array_fields, replace_units
from qkvflow.weights.bases import FunctionBasis
from qkvflow.weights.product import project
from qkvflow.weights.scales import TIME_SHARE

# `init` -> the share of the initial variance that depends on time.
TIME_SHARES = {"matched": TIME_SHARE, "independent": 1.0}


class Galerkin(TimeDependent):
    """An ordinary module whose arrays are combinations of functions of time."""

    coefficients: eqx.Module  # the ordinary module, whose arrays have the axis `basis` in front
    basis: FunctionBasis = eqx.field(static=True)

    def at(self, t: Time):
        return self._combined(on_time(self.basis.values, t, TIME_EMBED))

    def rate(self, t: Time):
        return self._combined(on_time(self.basis.derivatives, t, TIME_EMBED))

    def _combined(self, phi: NamedArray):
        return map_named(lambda c: project(phi, c.rename({BASIS: TIME_EMBED})), self.coefficients)

    def refined(self, dim: int) -> tuple["Galerkin", float]:
        """The same function of time with `dim` basis functions, and the relative error of that (0 if it is exact)."""
        fine = dataclasses.replace(self.basis, dim=dim)
        matrix, error = self.basis.refinement(dim)

        def refine(c: NamedArray) -> NamedArray:
            c = c.rearrange((BASIS, ...))
            array = jnp.tensordot(jnp.asarray(matrix, c.dtype), c.array, 1, precision="highest")
            return hax.named(array, (Axis(BASIS, dim), *c.axes[1:]))

        return Galerkin(map_named(refine, self.coefficients), fine), error


def expand(module, basis: FunctionBasis, share: float = TIME_SHARE, *, key):
    """Replace every smallest module with parameters inside the ordinary `module` by a `Galerkin` one.

    W(t) starts as the ordinary array, constant in time, except for the weights of Linears: a `share` of their variance
    comes from independently drawn coefficients (`FunctionBasis.flat_scales`). At every t the variance is that of the
    ordinary draw, up to `share`; of `piecewise`, exactly.
    """

    def build(unit, key) -> Galerkin:
        names = array_fields(unit)
        new = [
            _coefficients(
                getattr(unit, name), basis, share if isinstance(unit, hnn.Linear) and name == "weight" else 0.0, key=k
            )
            for name, k in zip(names, jax.random.split(key, len(names)), strict=True)
        ]
        return Galerkin(eqx.tree_at(lambda m: [getattr(m, n) for n in names], unit, new, is_leaf=is_named), basis)

    return replace_units(module, build, key=key)


def refine(module, dim: int):
    """The same W(t) with `dim` basis functions instead of K, for all basis weights inside `module`.

    A language model also gets the configuration that goes with them. Exact if the spaces are nested
    (`FunctionBasis.refinement`), otherwise the least-squares approximation over t, with a `Notice` of its error.

    Raises:
        UserError: for fewer functions than before, and for a module without basis weights.
    """
    fine, error = refine_with_error(module, dim)
    if error:
        name = _parts(fine)[0].basis.name
        text = (
            f"{name} with {dim} functions cannot represent W(t) exactly: it is approximated by least squares, with an"
            f" error of up to {error:.1e} for functions of the old basis"
        )
        warnings.warn(Notice(text), stacklevel=2)
    return fine


def refine_with_error(module, dim: int):
    """The refined module, and the relative error of the worst basis function in the mean square over t."""
    errors = []

    def refines_itself(m) -> bool:  # `Galerkin` weights, and language models, whose configuration changes too
        return hasattr(m, "refined")

    def one(m):
        if not refines_itself(m):
            return m
        fine, error = m.refined(dim)
        errors.append(error)
        return fine

    fine = jax.tree.map(one, module, is_leaf=refines_itself)
    if not errors:
        raise UserError("refine is for basis weights (weights: {type: basis}), and this module has none.")
    return fine, max(errors)


def roughness(module):
    """The integral of ||dW/dt||^2 over t in [0, 1], summed over all basis weights: sum_jk S_jk <C_j, C_k>, fp32.

    S_jk: the integral of phi'_j phi'_k, exact.

    Raises:
        UserError: for weights without a derivative (piecewise) and for a module without basis weights.
    """
    parts = _parts(module)
    if not parts:
        raise UserError("only basis weights (weights: {type: basis}) have a roughness in closed form.")
    if parts[0].basis.name == "piecewise":
        raise UserError("piecewise weights jump and have no derivative in time, so they have no roughness.")
    total = jnp.zeros((), jnp.float32)
    for part in parts:
        gram = jnp.asarray(part.basis.gram(derivative=True), jnp.float32)
        for c in jax.tree.leaves(part.coefficients):
            rows = c.astype(jnp.float32).reshape(c.shape[0], -1)
            total = total + jnp.sum(gram * (rows @ rows.T))
    return total


def _parts(module) -> list[Galerkin]:
    """The basis weights inside a module."""
    leaves = jax.tree.leaves(module, is_leaf=lambda m: isinstance(m, Galerkin))
    return [m for m in leaves if isinstance(m, Galerkin)]


def _coefficients(ordinary: NamedArray, basis: FunctionBasis, share: float, *, key) -> NamedArray:
    constant = jnp.asarray(basis.constant, ordinary.dtype)
    axes = (Axis(BASIS, basis.dim), *ordinary.axes)
    if not share or basis.dim == 1:
        return hax.named(jnp.multiply.outer(constant, ordinary.array), axes)
    std = jnp.sqrt(share * hax.var(ordinary).array)
    scales = jnp.asarray(basis.flat_scales, ordinary.dtype).reshape(-1, *[1] * ordinary.ndim)
    noise = hax.random.normal(key, axes).array * scales
    return hax.named(jnp.multiply.outer(constant, (1 - share) ** 0.5 * ordinary.array) + noise * std, axes)
