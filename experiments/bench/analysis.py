"""Spectra by thin products against dense matrices, and the memory of a Lyapunov spectrum, at the size of GPT-2 small.

Both methods get the same weights, evaluated from the flow within the measured time; the dense one gets one BLAS thread
for each matrix, too, which is faster than all threads on each. The first call also compiles the weights' evaluation.
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
    """The straightforward method: eigenvalues of each full {embed, embed} product."""
    left, right = (np.asarray(m) for m in products(model, family))
    return each(lambda a, b: np.linalg.eigvals(a.astype(np.float64) @ b.astype(np.float64)), left, right)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and processor time of all threads, which a busy machine disturbs less."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def spectra(model) -> None:
    rows = {}
    for family in ("qk", "ov"):

        def thin(family=family):
            return seconds(lambda: spectral.eigenvalues(model, family))

        first = thin()
        ours = [thin() for _ in range(3)]
        plain = seconds(lambda f=family: dense(model, f))
        ours += [thin() for _ in range(3)]
        wall, processor = (statistics.median(times) for times in zip(*ours, strict=True))
        rows[family] = {
            "first call s": first[0],
            "thin s": wall,
            "dense s": plain[0],
            "ratio": plain[0] / wall,
            "processor ratio": plain[1] / processor,
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
    taken, _ = seconds(lambda: lyapunov.spectrum(reading, tokens, EXPONENTS))
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
