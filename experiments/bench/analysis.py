"""Spectra by thin products compared with dense matrices, and the memory of a Lyapunov spectrum, for GPT-2 small.

Both methods get the same weights, evaluated from the flow within the measured time. The first call also includes its
compilation. In addition to the plain dense method there is one with one BLAS thread per matrix; both are measured on
one of the twelve layers and multiplied by twelve, in turn with the thin method, whose time covers all layers.
"""

import functools
import statistics
from pathlib import Path

import haliax as hax
import numpy as np

from experiments.bench.frame import Benchmark, Rows, run, seconds
from experiments.bench.gradients import build, flow
from qkvflow.analysis import lyapunov, spectral
from qkvflow.analysis.many import each
from qkvflow.analysis.matrices import products
from qkvflow.analysis.reading import read
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.weights import GeneratedConfig

WIDTH, HEADS, LAYERS, SEQUENCE, EXPONENTS = 768, 12, 12, 256, 8


@functools.cache
def model():
    weights = GeneratedConfig(time_embed_dim=20, sinusoidal_dim=128)
    config = flow(WIDTH, SEQUENCE, weights, Gpt2BlockConfig(num_heads=HEADS), steps=LAYERS)
    return build(config, hax.Axis("vocab", 512))


def dense(left: np.ndarray, right: np.ndarray, spread: bool) -> np.ndarray:
    """Eigenvalues of each full {embed, embed} product.

    spread: with one BLAS thread per matrix, which is faster, above all on busy cores.
    """
    return each(lambda a, b: np.linalg.eigvals(a @ b), left, right) if spread else np.linalg.eigvals(left @ right)


def spectra() -> Rows:
    rows = {}
    for family in ("qk", "ov"):
        first_layer = [np.asarray(m[:1], np.float64) for m in products(model(), family)]
        calls = [functools.partial(dense, *first_layer, spread) for spread in (False, True)]
        both = functools.partial(
            seconds, functools.partial(products, model(), family)
        )  # W(t), checked: once per method
        thin = functools.partial(seconds, functools.partial(spectral.eigenvalues, model(), family))
        first = thin()
        thin()
        rounds = []
        for _ in range(3):
            slow = [both() + seconds(call) * LAYERS for call in calls]
            own = statistics.median(thin() for _ in range(3))
            rounds.append([own, *slow, *(taken / own for taken in slow)])
        own, plain, spread, ratio, spread_ratio = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows[family] = {"first call s": first, "thin s": own, "dense s": plain, "ratio": ratio}
        rows[family] |= {"spread s": spread, "spread ratio": spread_ratio}
    return rows


def memory() -> Rows:
    """Peak memory, minus that of the model, during the computation of the spectrum, including compilation."""
    reading, tokens, state = read(model()), np.arange(SEQUENCE), SEQUENCE * WIDTH
    before = _bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    taken = seconds(lambda: lyapunov.spectrum(reading, tokens, EXPONENTS))
    return {
        "spectrum, measured": {"MiB": (_bytes("VmHWM") - before) / 2**20, "seconds": taken},
        "dense Jacobian of one token's output": {"MiB": WIDTH * state * 4 / 2**20},
        "dense Jacobian of one block": {"MiB": state**2 * 4 / 2**20},
    }


def _bytes(what: str) -> int:
    """Memory of this process in bytes: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


SETTINGS = {"width": WIDTH, "layers": LAYERS}
BENCHMARKS = (
    Benchmark("lyapunov_memory", SETTINGS | {"sequence": SEQUENCE, "k": EXPONENTS}, memory),
    Benchmark("spectra", SETTINGS | {"heads": HEADS}, spectra),
)

if __name__ == "__main__":
    run(BENCHMARKS)
