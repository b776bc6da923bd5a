"""Lyapunov exponents of a linearised flow: Benettin's method, its starting directions, and the paper's token-level one.

Layer-time ends at 1, so all exponents are finite-time: lambda_i = log sigma_i(D Phi), the logarithms of the singular
values of the tangent map from x(0) to x(1). Benettin's method pushes k directions through the steps and makes them
orthonormal again after each,

    D Phi_n Q_n = Q_{n+1} R_{n+1},    lambda_i = sum_n log |R_n|_ii.

From random directions it needs long times to turn towards the leading ones; one pass through a network is short, and
the result depends on the draw. From the leading right singular vectors of D Phi it gives log sigma_i exactly, since
their images are orthogonal. Block Krylov iteration (Musco and Musco 2015) finds these vectors; it too only needs
products with D Phi and its transpose.
"""

from collections.abc import Callable

import numpy as np

from qkvflow.analysis.many import for_each
from qkvflow.analysis.tangent import Tangent

Tick = Callable[[int, int], None]  # (done, total)
_CONVERGED = 1e-4  # change of each log sigma_i between two sweeps
_LARGEST_BASIS = 8  # blocks of k directions kept before the iteration restarts from the best of them


def benettin(tangent: Tangent, directions: np.ndarray) -> np.ndarray:
    """log |R_ii| of each step, [steps, k], from orthonormal directions [k, position, embed]."""
    q, logs = directions, []
    for n in range(tangent.steps):
        pushed = np.asarray(tangent.forward(n, q), np.float64).reshape(len(directions), -1)
        columns, r = np.linalg.qr(pushed.T)
        with np.errstate(divide="ignore"):  # a direction may vanish
            logs.append(np.log(np.abs(np.diagonal(r))))
        q = columns.T.reshape(-1, *tangent.shape)
    return np.stack(logs)


def leading_directions(tangent: Tangent, k: int, *, sweeps: int, seed: int = 0, tick: Tick | None = None) -> np.ndarray:
    """Right singular vectors of D Phi for its k largest singular values, [k, position, embed], orthonormal.

    Args:
        sweeps: maximum number; each costs k products with D Phi and k with its transpose. 0: random directions. Stops
            when the logarithms of all k singular values change by less than 1e-4.
    """
    block = np.linalg.qr(np.random.default_rng(seed).standard_normal((tangent.size, k)))[0]
    best, before = block, None
    basis = images = np.zeros((tangent.size, 0))
    for sweep in range(sweeps):
        basis = np.concatenate([basis, block], axis=1)
        images = np.concatenate([images, _columns(tangent.through(_rows(block, tangent)))], axis=1)
        # The best approximation from the basis: singular vectors of D Phi restricted to it.
        _, sigma, mix = np.linalg.svd(np.linalg.qr(images, mode="r"))
        best = basis @ mix[:k].T
        logs = np.log(np.maximum(sigma[:k], 1e-12))  # a direction that vanishes has no logarithm
        if tick is not None:
            tick(sweep + 1, sweeps)
        if before is not None and np.abs(logs - before).max() < _CONVERGED:
            break
        before = logs
        if basis.shape[1] >= _LARGEST_BASIS * k:
            basis, images, mix = basis @ mix[: 2 * k].T, images @ mix[: 2 * k].T, np.eye(2 * k)
        pulled = _columns(tangent.back_through(_rows(images @ mix[:k].T, tangent)))
        block = _new_directions(basis, pulled)
        if block.shape[1] == 0:  # the basis is closed under the map
            break
    return np.linalg.qr(best)[0].T.reshape(-1, *tangent.shape)


def token_logs(jacobians: Callable[[int], np.ndarray], steps: int, tick: Tick | None = None) -> np.ndarray:
    """The paper's recursion for each input token separately: Q_0 = I; (I + h J_n) Q_n = Q_{n+1} R_{n+1}; log |R_ii|.

    Args:
        jacobians: n -> h J_n, [embed_out, position, embed_in]: the derivative of the output position with respect to
            each input position.

    Returns:
        [steps, position, embed].
    """
    q, logs = None, []
    for n in range(steps):
        j = np.swapaxes(jacobians(n), 0, 1)  # [position, embed_out, embed_in]
        if q is None:
            q = np.broadcast_to(np.eye(j.shape[-1]), j.shape).copy()

        def push(i: int, j=j, q=q) -> np.ndarray:
            q[i], r = np.linalg.qr(q[i] + j[i].astype(np.float64) @ q[i])
            return np.diagonal(r)

        with np.errstate(divide="ignore"):
            logs.append(np.log(np.abs(for_each(push, len(j)))))
        if tick is not None:
            tick(n + 1, steps)
    return np.stack(logs)


def kaplan_yorke(exponents) -> float:
    """The Kaplan-Yorke dimension j + (lambda_1 + ... + lambda_j) / |lambda_{j+1}|, with the largest j whose sum is not
    negative.

    0 if lambda_1 < 0. NaN if the sum never becomes negative: either more exponents are needed, or all volumes grow and
    the dimension has no meaning.
    """
    ordered = np.sort(np.asarray(exponents, np.float64))[::-1]
    sums = np.cumsum(ordered)
    if ordered[0] < 0:
        return 0.0
    negative = np.flatnonzero(sums < 0)
    if len(negative) == 0:
        return float("nan")
    j = negative[0]
    return float(j + sums[j - 1] / abs(ordered[j]))


def _new_directions(basis: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what `columns` add to the span of `basis`, up to float32 rounding."""
    rest = columns
    for _ in range(2):  # the second pass removes rounding errors
        rest = rest - basis @ (basis.T @ rest)
    u, size, _ = np.linalg.svd(rest, full_matrices=False)
    scale = np.linalg.norm(columns, axis=0).max()
    room = basis.shape[0] - basis.shape[1]
    return u[:, size > 1e-6 * scale][:, :room]


def _rows(columns: np.ndarray, tangent: Tangent) -> np.ndarray:
    return columns.T.reshape(-1, *tangent.shape)


def _columns(rows) -> np.ndarray:
    return np.asarray(rows, np.float64).reshape(len(rows), -1).T
