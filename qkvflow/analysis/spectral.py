"""Spectra over layer-time: eigenvalues of QK, OV and FF, complex, at the times of training or any others.

    python -m qkvflow.analysis.spectral --run runs/quickstart

writes eigenvalues, singular values and what is read off them, beside a band of fresh models, into `<run>/analysis/`,
as `spectral.npz` and figures (PNG and PDF). With `--text` also the eigenvalues of the field's own Jacobian there.
"""

from dataclasses import fields

import equinox as eqx
import jax
import numpy as np
from levanter.models.lm_model import LmHeadModel

from qkvflow.analysis import spectrum
from qkvflow.analysis.matrices import official_times as official_times
from qkvflow.analysis.matrices import products
from qkvflow.analysis.matrices import training_times as training_times
from qkvflow.analysis.reading import Reading, read, sequence
from qkvflow.analysis.spectrum import Summary
from qkvflow.analysis.tangent import Tangent
from qkvflow.errors import UserError


def qk_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Non-zero eigenvalues of W_Q^h (W_K^h)^T, complex128 [time, heads, head_size], by decreasing modulus.

    times: numbers in [0, 1]; those of training if not given. See `qkvflow.analysis.matrices` for what is left out.
    """
    return eigenvalues(model, "qk", times)


def ov_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Non-zero eigenvalues of W_V^h W_O^h, complex128 [time, heads, head_size], by decreasing modulus."""
    return eigenvalues(model, "ov", times)


def ff_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Eigenvalues of W_1 W_2, the MLP without its nonlinearity, complex128 [time, embed], by decreasing modulus."""
    return eigenvalues(model, "ff", times)


def eigenvalues(model: LmHeadModel, family: str, times=None) -> np.ndarray:
    """The eigenvalues of `family` (`qk`, `ov`, `ff`): see the functions above."""
    product = products(model, family, times)
    embed, inner = product.left.shape[-2:]
    return spectrum.eigenvalues(product, embed if family == "ff" else min(embed, inner))


def singular_values(model: LmHeadModel, family: str, times=None) -> np.ndarray:
    """Singular values of the same matrices, float64, descending: [time, heads, head_size], for `ff` [time, embed]."""
    return spectrum.singular_values(products(model, family, times))


def summary(model: LmHeadModel, family: str, times=None) -> Summary:
    """Radius, signs, parts, norm and symmetry of the matrices: each [time, heads], for `ff` [time]."""
    product = products(model, family, times)
    embed, inner = product.left.shape[-2:]
    values = spectrum.eigenvalues(product, embed if family == "ff" else min(embed, inner))
    return spectrum.summary(values, spectrum.singular_values(product))


def random_summaries(model: LmHeadModel, family: str, times=None, *, draws: int = 5, seed: int = 0) -> Summary:
    """`summary` of fresh models of the same configuration, before any training: each field [draws, time, heads].

    Only the matrices that are asked for are drawn. What training did is what leaves this band.
    """
    if draws < 1:
        raise UserError(f"draws must be at least 1, got {draws}.")
    times = training_times(model) if times is None else times

    @eqx.filter_jit
    def draw(key):
        return products(model.config.build(model.Vocab, key=key), family, times)

    results = []
    for key in jax.random.split(jax.random.PRNGKey(seed), draws):
        product = draw(key)
        embed, inner = product.left.shape[-2:]
        values = spectrum.eigenvalues(product, embed if family == "ff" else min(embed, inner))
        results.append(spectrum.summary(values, spectrum.singular_values(product)))
    return Summary(**{f.name: np.stack([getattr(r, f.name) for r in results]) for f in fields(Summary)})


def jacobian_eigenvalues(model: LmHeadModel | Reading, tokens, position: int = -1) -> np.ndarray:
    """Eigenvalues of d F_n(x)_j / d x_j at the states of a text, complex128 [steps, embed], by decreasing modulus.

    F is the whole vector field, with norms and nonlinearities; j is `position`. Positive real parts push states of
    this token apart, negative ones draw them together. A step of length h is I + h J.
    """
    reading = model if isinstance(model, Reading) else read(model)
    tangent = Tangent(reading, sequence(reading, tokens))
    j = range(tangent.shape[0])[position]
    blocks = [np.asarray(tangent.jacobian_rows(n, j)[:, j], np.float64) for n in range(tangent.steps)]
    return spectrum.sort(np.linalg.eigvals(np.stack(blocks) / reading.step))
