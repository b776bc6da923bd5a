"""Memory, time and compile time of every adjoint against the number of steps (XLA's own count of temporary memory).

Constant weights show the states alone; generated weights, `batched` and `in_scan`, what W(t) adds.
"""

import statistics
import time

import jax

from experiments.bench.models import HEADS, SMALL, flow, loss
from experiments.bench.timing import interleaved, report
from qkvflow.weights import ConstantConfig

SETTINGS = {"width": 128, "heads": HEADS, "sequence": 128, "batch": 8}
STEPS = (8, 16, 32, 64)
CASES = {
    "checkpoint": (ConstantConfig(), {}),
    "direct": (ConstantConfig(), {"adjoint": "direct"}),
    "reversible": (ConstantConfig(), {"adjoint": "reversible"}),
    "backsolve": (ConstantConfig(), {"adjoint": "backsolve", "endpoint": "left"}),
    "checkpoint, generated, batched": (SMALL, {"evaluate": "batched"}),
    "reversible, generated, batched": (SMALL, {"adjoint": "reversible", "evaluate": "batched"}),
    "reversible, generated, in scan": (SMALL, {"adjoint": "reversible", "evaluate": "in_scan"}),
}


def compiled(weights, steps: int, **depth):
    """(a call that computes loss and gradients once, bytes of temporary memory, seconds of compilation)."""
    config = flow(SETTINGS["width"], SETTINGS["sequence"], weights, steps=steps, **depth)
    compute, params = loss(config, SETTINGS["batch"])
    start = time.perf_counter()
    program = jax.jit(compute).lower(params).compile()
    taken = time.perf_counter() - start
    return (lambda: program(params)), program.memory_analysis().temp_size_in_bytes, taken


def memory(rounds: int) -> None:
    runs, sizes = {}, {}
    for name, (weights, depth) in CASES.items():
        programs = [compiled(weights, steps, **depth) for steps in STEPS]
        sizes[name] = {f"MiB_{steps}": size / 2**20 for steps, (_, size, _) in zip(STEPS, programs, strict=True)}
        runs[name] = programs[1][0]
    rows = interleaved(runs, rounds, reference="checkpoint")
    rows = {name: sizes[name] | {f"ratio_at_{STEPS[1]}": rows[name]["ratio"]} for name in runs}
    report("adjoints", {**SETTINGS, "solver": "euler"}, rows)


def compile_time(rounds: int) -> None:
    """Seconds from tracing to the compiled gradient, at 6 and at 48 steps, in turn."""
    rows = {}
    for name, (weights, depth) in CASES.items():
        pairs = [[compiled(weights, steps, **depth)[2] for steps in (6, 48)] for _ in range(rounds)]
        short, long = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(long / short for short, long in pairs)
        rows[name] = {"seconds_6": short, "seconds_48": long, "ratio": ratio}
    report("compile_time", {key: SETTINGS[key] for key in ("width", "sequence", "batch")}, rows)


def main(rounds: int = 7) -> None:
    memory(rounds)
    compile_time(5)


if __name__ == "__main__":
    main()
