"""Spectra by thin products against dense matrices, and the memory of a Lyapunov spectrum, at the size of GPT-2 small.

Both methods get the same weights, evaluated from the flow within the measured time. The first call also compiles that.
Beside the straightforward dense method stands one with a BLAS thread for each matrix; both are measured on one layer of
the twelve and counted twelvefold, in turn with the thin one, whose time is that of all layers.
"""

import statistics
import threading

import haliax as hax
import numpy as np

from experiments.bench.models import build, flow
from experiments.bench.timing import report, seconds
from qkvflow.analysis import lyapunov, spectral
from qkvflow.analysis.many import each
from qkvflow.analysis.matrices import products
from qkvflow.analysis.reading import read
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.weights import GeneratedConfig

WIDTH, HEADS, LAYERS, SEQUENCE, EXPONENTS = 768, 12, 12, 256, 8


def model():
    weights = GeneratedConfig(time_embed_dim=20, sinusoidal_dim=128)
    config = flow(WIDTH, SEQUENCE, weights, Gpt2BlockConfig(num_heads=HEADS), steps=LAYERS)
    return build(config, hax.Axis("vocab", 512))


def dense(model, family: str) -> np.ndarray:
    """The straightforward method for the first layer: eigenvalues of each full {embed, embed} product."""
    left, right = (np.asarray(m[:1], np.float64) for m in products(model, family))
    return np.linalg.eigvals(left @ right)


def dense_spread(model, family: str) -> np.ndarray:
    """The same with one BLAS thread for each matrix: faster, above all where cores are busy."""
    left, right = (np.asarray(m[:1], np.float64) for m in products(model, family))
    return each(lambda a, b: np.linalg.eigvals(a @ b), left, right)


def spectra(model) -> None:
    rows = {}
    for family in ("qk", "ov"):

        def thin(family=family):
            return seconds(lambda: spectral.eigenvalues(model, family))

        first = thin()
        thin()
        rounds = []
        for _ in range(3):
            slow = [seconds(lambda f=family, m=method: m(model, f)) * LAYERS for method in (dense, dense_spread)]
            rounds.append([statistics.median(thin() for _ in range(3)), *slow])
        rounds = [[*r, r[1] / r[0], r[2] / r[0]] for r in rounds]
        own, plain, spread, ratio, spread_ratio = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows[family] = {"first call s": first, "thin s": own, "dense s": plain, "ratio": ratio}
        rows[family] |= {"spread s": spread, "spread ratio": spread_ratio}
    report("spectra", {"width": WIDTH, "heads": HEADS, "layers": LAYERS}, rows)


def memory(model) -> None:
    """The most memory beyond that of the model while the spectrum is computed, compilation included."""
    reading, tokens = read(model), np.arange(SEQUENCE)
    before, most, done = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    taken = seconds(lambda: lyapunov.spectrum(reading, tokens, EXPONENTS))
    done.set()
    watcher.join()
    state = SEQUENCE * WIDTH
    rows = {
        "spectrum, measured": {"MiB": (most - before) / 2**20},
        "dense Jacobian of one token's output": {"MiB": WIDTH * state * 4 / 2**20},
        "dense Jacobian of one block": {"MiB": state**2 * 4 / 2**20},
    }
    settings = {"width": WIDTH, "layers": LAYERS, "sequence": SEQUENCE, "k": EXPONENTS, "seconds": round(taken)}
    report("lyapunov_memory", settings, rows)


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    m = model()
    memory(m)
    spectra(m)


if __name__ == "__main__":
    main()
