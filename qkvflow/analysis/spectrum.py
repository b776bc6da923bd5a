"""Eigenvalues and singular values of thin products, and their summaries.

left @ right {embed, embed} has rank <= inner, and its non-zero eigenvalues are those of right @ left {inner, inner}.
For a head size of 64 and a width of 768 that matrix has 1/144 of the size.
"""

from dataclasses import dataclass

import numpy as np

from qkvflow.analysis.many import each
from qkvflow.analysis.matrices import ThinProduct


@dataclass(frozen=True)
class Summary:
    """Summary of the spectra of matrices M; each field has the shape of the leading axes ([time, heads] or [time]).

    Attributes:
        radius: max |lambda|.
        positive: share of the eigenvalues with positive real part.
        real, imaginary: root mean squares of the two parts of lambda.
        norm: Frobenius norm of M, sqrt(sum sigma^2).
        symmetric: ||S||^2 / ||M||^2 for M = S + A, S symmetric, A antisymmetric: (1 + tr(M^2) / ||M||^2) / 2, with
            tr(M^2) = sum lambda^2. 1 for a symmetric, 0 for an antisymmetric, 1/2 for a large random matrix.
    """

    radius: np.ndarray
    positive: np.ndarray
    real: np.ndarray
    imaginary: np.ndarray
    norm: np.ndarray
    symmetric: np.ndarray


def eigenvalues(product: ThinProduct, count: int) -> np.ndarray:
    """complex128 [..., count], by decreasing modulus, the positive imaginary part of a pair first.

    Args:
        count: at least min(embed, inner), at most embed: beyond the rank there are zeros.
    """
    left, right = (np.asarray(m) for m in product)
    if left.shape[-1] < left.shape[-2]:
        left, right = right, left
    values = each(lambda a, b: np.linalg.eigvals(_product(a, b)).astype(np.complex128), left, right)
    padding = count - values.shape[-1]
    if padding > 0:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], padding), np.complex128)], axis=-1)
    return sort(values)


def sort(values: np.ndarray) -> np.ndarray:
    """complex128, by decreasing modulus along the last axis, the positive imaginary part of a pair first."""
    values = np.asarray(values, np.complex128)
    order = np.lexsort((-values.imag, -np.abs(values)), axis=-1)
    return np.take_along_axis(values, order, axis=-1)


def singular_values(product: ThinProduct) -> np.ndarray:
    """float64 [..., min(embed, inner)], descending: by R_1 R_2^T of the thin factors' QR decompositions."""
    left, right = (np.asarray(m) for m in product)
    return each(_singular_values, left, right)


def summary(eigenvalues: np.ndarray, singular_values: np.ndarray) -> Summary:
    """From complex [..., n] and float [..., m]; `positive`, `real` and `imaginary` are over the n given eigenvalues."""
    norm2 = np.sum(singular_values**2, axis=-1)
    trace2 = np.sum(eigenvalues**2, axis=-1).real
    with np.errstate(invalid="ignore", divide="ignore"):
        symmetric = np.where(norm2 > 0, 0.5 * (1.0 + trace2 / norm2), np.nan)
    return Summary(
        radius=np.abs(eigenvalues).max(axis=-1),
        positive=(eigenvalues.real > 0).mean(axis=-1),
        real=np.sqrt(np.mean(eigenvalues.real**2, axis=-1)),
        imaginary=np.sqrt(np.mean(eigenvalues.imag**2, axis=-1)),
        norm=np.sqrt(norm2),
        symmetric=symmetric,
    )


def _singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.shape[-1] >= left.shape[-2]:
        return np.linalg.svd(_product(left, right), compute_uv=False)
    r_left = np.linalg.qr(left.astype(np.float64), mode="r")
    r_right = np.linalg.qr(right.T.astype(np.float64), mode="r")
    return np.linalg.svd(r_left @ r_right.T, compute_uv=False)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)
