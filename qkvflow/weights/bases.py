"""Bases of functions of layer-time on [0, 1]: values, derivatives, and the matrix from one basis to a finer one.

| basis       | phi_k(t), k = 0..K-1                                                        | derivatives |
|-------------|-----------------------------------------------------------------------------|-------------|
| `chebyshev` | T_k(2t - 1)                                                                 | all         |
| `cosine`    | cos(pi k t)                                                                 | all         |
| `linear`    | hat functions on K equidistant nodes 0, 1/(K-1), ..., 1                           | corners     |
| `spline`    | cubic B-splines on K - 3 equal intervals (of degree K - 1 if K < 4)         | 2           |
| `piecewise` | 1 on the k-th of K equal intervals, 0 elsewhere                             | jumps       |

Every basis with K = 1 is the constant 1, and every basis holds the constants: sum_k `constant`_k phi_k = 1.
Times known at trace time are evaluated in float64, others in their own precision, fp32 at least.
Sources: Massaroli et al., Dissecting Neural ODEs (2020), Galerkin form; Queiruga et al., Stateful ODE-Nets (2021).
"""

import dataclasses
import functools
import numbers
from dataclasses import dataclass

import numpy as np

from qkvflow.errors import UserError

BASES = ("chebyshev", "cosine", "linear", "spline", "piecewise")
_DEGREE = {"linear": 1, "spline": 3}
_AT_BOUNDARY = 1e-5  # in widths of an interval, in fp32: closer times are the boundary itself


@dataclass(frozen=True)
class FunctionBasis:
    """K = `dim` functions on [0, 1].

    Attributes:
        right_closed: of `piecewise`: a time between two intervals belongs to the left one, as the right end points of
            Euler's steps want it (t = (k+1)/K is in the k-th interval); else to the right one.
    """

    name: str
    dim: int
    right_closed: bool = True

    def __post_init__(self):
        if self.name not in BASES:
            raise UserError(f"basis: {self.name!r} is not known. Choices: {', '.join(BASES)}.")
        if not isinstance(self.dim, numbers.Integral) or isinstance(self.dim, bool) or self.dim < 1:
            raise UserError(f"dim: a basis has a whole number of functions, at least 1; got {self.dim!r}.")
        object.__setattr__(self, "dim", int(self.dim))  # of NumPy, perhaps

    def values(self, t, xp=np):
        """phi(t): [..., K] from times [...] in [0, 1].

        Args:
            xp: numpy, or jax.numpy for one time (`jax.vmap` for more).
        """
        if self.name == "chebyshev":
            return _chebyshev(self.dim, t, xp)
        if self.name == "cosine":
            return xp.cos(np.pi * t[..., None] * xp.arange(self.dim, dtype=t.dtype))
        if self.name == "piecewise":
            return _piecewise(self.dim, t, xp, self.right_closed)
        return _bspline(self._knots, self._degree, t, xp)

    def derivatives(self, t, xp=np):
        """phi'(t): [..., K]; from the right at the corners of `linear`, 0 at the jumps of `piecewise`."""
        if self.name == "chebyshev":
            return _chebyshev_derivative(self.dim, t, xp)
        if self.name == "cosine":
            frequency = np.pi * xp.arange(self.dim, dtype=t.dtype)
            return -frequency * xp.sin(t[..., None] * frequency)
        if self.name == "piecewise" or self._degree == 0:
            return xp.zeros((*t.shape, self.dim), t.dtype)
        return _bspline_derivative(self._knots, self._degree, t, xp)

    @property
    def _degree(self) -> int:
        return min(_DEGREE[self.name], self.dim - 1)

    @property
    def _knots(self) -> np.ndarray:
        """Equal intervals, with the ends repeated so that the first and the last function reach 1 there."""
        intervals = self.dim - self._degree
        inner = np.arange(intervals + 1) / intervals  # k / n exactly, unlike linspace
        return np.concatenate([np.zeros(self._degree), inner, np.ones(self._degree)])

    @property
    def constant(self) -> np.ndarray:
        """Coefficients of the constant function 1, [K]."""
        if self.name in ("chebyshev", "cosine"):
            return np.eye(self.dim)[0]
        return np.ones(self.dim)

    @property
    def flat_scales(self) -> np.ndarray:
        """Standard deviations s_k of independent coefficients whose combination varies in time, and whose variance
        g(t) = sum_k s_k^2 phi_k(t)^2 is near 1 at all t: (max g + min g) / 2 = 1. Zero for the function 1 itself; of
        B-splines g is equal at the places of their peaks. [K]."""
        squares = np.ones(self.dim) if self.constant.all() else 1.0 - self.constant
        if self.name in _DEGREE and self._degree:
            peaks = np.lib.stride_tricks.sliding_window_view(self._knots[1:-1], self._degree).mean(axis=1)  # Greville
            squares = np.linalg.solve(self.values(peaks) ** 2, squares)
        places = np.array_split(np.linspace(0.0, 1.0, 64 * self.dim + 1), 64)  # a part at a time, for memory
        variance = np.concatenate([self.values(t) ** 2 @ squares for t in places])
        return np.sqrt(2 * squares / (variance.max() + variance.min()))

    @property
    def _points(self) -> int:
        """Of Gauss-Legendre in each interval, for products of two functions: n are exact up to the degree 2n - 1."""
        if self.name == "piecewise":
            return 1
        return self._degree + 1 if self.name in _DEGREE else 4 * self.dim + 8

    @property
    def breakpoints(self) -> np.ndarray:
        """Where the functions are not smooth, ends included."""
        if self.name in _DEGREE:
            return np.unique(self._knots)
        return np.linspace(0.0, 1.0, 1 + (self.dim if self.name == "piecewise" else 1))

    def gram(self, *, derivative: bool = False) -> np.ndarray:
        """The integral of phi_j phi_k over [0, 1], [K, K]; with `derivative` of phi'_j phi'_k. Exact to rounding."""
        return _gram(self, derivative)

    def refinement(self, dim: int) -> tuple[np.ndarray, float]:
        """R [dim, K], so that the coefficients R c of the basis with `dim` functions make the same function, and the
        largest relative error of that, in the mean square over t: 0 where the spaces are nested.

        Nested: chebyshev and cosine always, linear if dim - 1 is a multiple of K - 1, piecewise if dim is one of K, a
        spline if dim - 3 is one of K - 3; the constant in all. Least squares otherwise.

        Raises:
            UserError: fewer functions.
        """
        if dim < self.dim:
            raise UserError(
                f"refine: {dim} functions of time are fewer than the {self.dim} of these weights and cannot represent"
                f" them. Give at least {self.dim}."
            )
        fine = dataclasses.replace(self, dim=dim)
        if self.name in ("chebyshev", "cosine"):
            return np.eye(dim, self.dim), 0.0
        if self.name == "piecewise" and dim % self.dim == 0:
            return np.repeat(np.eye(self.dim), dim // self.dim, axis=0), 0.0
        if self.name == "linear" and (self.dim == 1 or (dim - 1) % (self.dim - 1) == 0):
            return self.values(np.linspace(0.0, 1.0, dim)) if dim > 1 else np.ones((1, 1)), 0.0
        breaks = np.unique(np.concatenate([self.breakpoints, fine.breakpoints]).round(14))
        t, weight = _quadrature(breaks, fine._points)
        new, old = fine.values(t), self.values(t)
        root = np.sqrt(weight)[:, None]
        matrix = np.linalg.lstsq(root * new, root * old, rcond=None)[0]
        wrong = np.einsum("q,qk->k", weight, (new @ matrix - old) ** 2)
        error = float(np.sqrt((wrong / np.einsum("q,qk->k", weight, old**2)).max()))
        return matrix, error if error > 1e-12 else 0.0


@functools.cache
def _gram(basis: FunctionBasis, derivative: bool) -> np.ndarray:
    t, weight = _quadrature(basis.breakpoints, basis._points)
    values = (basis.derivatives if derivative else basis.values)(t)
    found = np.einsum("q,qj,qk->jk", weight, values, values, optimize=True)
    found.flags.writeable = False
    return found


def _chebyshev(dim: int, t, xp):
    """T_k(x), x = 2t - 1, by T_{k+1} = 2 x T_k - T_{k-1}."""
    x = 2 * t - 1
    found = [xp.ones_like(x), x]
    for _ in range(dim - 2):
        found.append(2 * x * found[-1] - found[-2])
    return xp.stack(found[:dim], axis=-1)


def _chebyshev_derivative(dim: int, t, xp):
    """d/dt T_k(2t - 1) = 2 k U_{k-1}(2t - 1), U_{k+1} = 2 x U_k - U_{k-1}."""
    x = 2 * t - 1
    second = [xp.ones_like(x), 2 * x]
    for _ in range(dim - 3):
        second.append(2 * x * second[-1] - second[-2])
    return xp.stack([xp.zeros_like(x), *(2 * k * second[k - 1] for k in range(1, dim))], axis=-1)


def _piecewise(dim: int, t, xp, right_closed: bool):
    place = t * dim
    nearest = xp.round(place)
    # The rounding of t dim grows with dim.
    at_boundary = 1e-9 if t.dtype == np.float64 else max(_AT_BOUNDARY, dim * 2.0**-23)
    near = xp.abs(place - nearest) < at_boundary
    index = xp.where(near, nearest - 1 if right_closed else nearest, xp.floor(place))
    return (xp.clip(index, 0, dim - 1)[..., None] == xp.arange(dim)).astype(t.dtype)


def _bspline(knots: np.ndarray, degree: int, t, xp):
    """All B-splines of `degree` on `knots` by the recursion of Cox and de Boor: [..., len(knots) - degree - 1]."""
    knots = np.asarray(knots, t.dtype)
    # Sums of steps may be a rounding error beyond the ends. Not `clip`, whose derivative at the ends is one half.
    t = xp.where(t < knots[0], knots[0], xp.where(t > knots[-1], knots[-1], t))
    left, right = knots[:-1], knots[1:]
    is_last = np.arange(len(left)) == np.flatnonzero(left < right)[-1]  # this interval holds t = 1 too
    t = t[..., None]
    found = ((left < right) & (t >= left) & ((t < right) | (is_last & (t <= right)))).astype(t.dtype)
    for p in range(1, degree + 1):
        count = len(knots) - p - 1
        up, down = _inverse_widths(knots, p, count)
        rise, fall = (t - knots[:count]) * up, (knots[p + 1 :] - t) * down
        found = rise * found[..., :count] + fall * found[..., 1:]
    return found


def _bspline_derivative(knots: np.ndarray, degree: int, t, xp):
    """N'_{k,p} = p / (u_{k+p} - u_k) N_{k,p-1} - p / (u_{k+p+1} - u_{k+1}) N_{k+1,p-1}."""
    knots = np.asarray(knots, t.dtype)
    lower = _bspline(knots, degree - 1, t, xp)
    up, down = _inverse_widths(knots, degree, len(knots) - degree - 1)
    return degree * (up * lower[..., :-1] - down * lower[..., 1:])


def _inverse_widths(knots: np.ndarray, p: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """1 / (u_{k+p} - u_k) and 1 / (u_{k+p+1} - u_{k+1}) for the first `count` k; 0 where knots coincide."""
    widths = (knots[p : p + count] - knots[:count], knots[p + 1 :] - knots[1 : 1 + count])
    return tuple(np.where(w > 0, 1 / np.where(w > 0, w, 1), 0).astype(w.dtype) for w in widths)


def _quadrature(breaks: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on each interval between neighbouring `breaks`."""
    x, w = np.polynomial.legendre.leggauss(points)
    left, width = breaks[:-1, None], np.diff(breaks)[:, None]
    return (left + width * (x + 1) / 2).ravel(), (width * w / 2).ravel()
