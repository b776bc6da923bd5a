"""Spectra by thin products against dense matrices, and the memory of a Lyapunov spectrum, at the size of GPT-2 small.

Both methods get the same weights, evaluated from the flow within the measured time. The first call also compiles that.
Beside the straightforward dense method stands one with a BLAS thread for each matrix; both are measured on one layer of
the twelve and counted twelvefold, in turn with the thin one, whose time is that of all layers.
"""

import statistics
import threading
import time
from collections.abc import Callable

import haliax as hax
import jax
import numpy as np

from experiments.bench.timing import report
from qkvflow.analysis import lyapunov, spectral
from qkvflow.analysis.many import each
from qkvflow.analysis.matrices import products
from qkvflow.analysis.reading import read
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig

WIDTH, HEADS, LAYERS, SEQUENCE, EXPONENTS = 768, 12, 12, 256, 8
Vocab = hax.Axis("vocab", 512)


def model():
    config = NeuralOdeConfig(
        max_seq_len=SEQUENCE,
        hidden_dim=WIDTH,
        block=Gpt2BlockConfig(num_heads=HEADS),
        weights=GeneratedConfig(time_embed_dim=20, sinusoidal_dim=128),
        depth=DepthConfig(steps=LAYERS),
    )
    return config.build(Vocab, key=jax.random.PRNGKey(0))


def dense(model, family: str) -> np.ndarray:
    """The straightforward method for the first layer: eigenvalues of each full {embed, embed} product."""
    left, right = (np.asarray(m[:1], np.float64) for m in products(model, family))
    return np.linalg.eigvals(left @ right)


def dense_spread(model, family: str) -> np.ndarray:
    """The same with one BLAS thread for each matrix: faster, above all where cores are busy."""
    left, right = (np.asarray(m[:1], np.float64) for m in products(model, family))
    return each(lambda a, b: np.linalg.eigvals(a @ b), left, right)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def spectra(model) -> None:
    rows = {}
    for family in ("qk", "ov"):

        def thin(family=family):
            return seconds(lambda: spectral.eigenvalues(model, family))

        first = thin()
        thin()
        rounds = []
        for _ in range(3):
            plain = seconds(lambda f=family: dense(model, f)) * LAYERS
            spread = seconds(lambda f=family: dense_spread(model, f)) * LAYERS
            rounds.append((statistics.median(thin() for _ in range(3)), plain, spread))
        rows[family] = {
            "first call s": first,
            "thin s": statistics.median(r[0] for r in rounds),
            "dense s": statistics.median(r[1] for r in rounds),
            "ratio": statistics.median(r[1] / r[0] for r in rounds),
            "spread s": statistics.median(r[2] for r in rounds),
            "spread ratio": statistics.median(r[2] / r[0] for r in rounds),
        }
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
