"""Memory, time and compile time of every adjoint against the number of steps (XLA's own count of temporary memory).

Constant weights show the states alone; generated weights, `batched` and `in_scan`, what W(t) adds.
"""

import time

import equinox as eqx
import jax

from experiments.bench.timing import interleaved, report
from experiments.bench.training_step import Vocab, example
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import ConstantConfig, GeneratedConfig

WIDTH, HEADS, SEQUENCE, BATCH = 128, 4, 128, 8
STEPS = (8, 16, 32, 64)
GENERATED = GeneratedConfig(time_embed_dim=16, sinusoidal_dim=32)
CASES = {
    "checkpoint": (ConstantConfig(), {}),
    "direct": (ConstantConfig(), {"adjoint": "direct"}),
    "reversible": (ConstantConfig(), {"adjoint": "reversible"}),
    "backsolve": (ConstantConfig(), {"adjoint": "backsolve", "endpoint": "left"}),
    "checkpoint, generated, batched": (GENERATED, {"evaluate": "batched"}),
    "reversible, generated, batched": (GENERATED, {"adjoint": "reversible", "evaluate": "batched"}),
    "reversible, generated, in scan": (GENERATED, {"adjoint": "reversible", "evaluate": "in_scan"}),
}


def compiled(weights, steps: int, **depth):
    """(a call that computes loss and gradients once, bytes of temporary memory, seconds of compilation)."""
    config = NeuralOdeConfig(
        max_seq_len=SEQUENCE,
        hidden_dim=WIDTH,
        block=Gpt2BlockConfig(num_heads=HEADS),
        weights=weights,
        depth=DepthConfig(solver="euler", steps=steps, **depth),
    )
    params, static = eqx.partition(config.build(Vocab, key=jax.random.PRNGKey(0)), eqx.is_inexact_array)
    data = example(SEQUENCE, BATCH)
    loss = jax.value_and_grad(lambda p: eqx.combine(p, static).compute_next_token_loss(data).scalar())
    start = time.perf_counter()
    lowered = jax.jit(lambda p: loss(p)).lower(params)
    program = lowered.compile()
    seconds = time.perf_counter() - start
    return (lambda: program(params)), program.memory_analysis().temp_size_in_bytes, seconds


def memory(rounds: int) -> None:
    runs, sizes = {}, {}
    for name, (weights, depth) in CASES.items():
        programs = [compiled(weights, steps, **depth) for steps in STEPS]
        sizes[name] = {f"MiB_{steps}": size / 2**20 for steps, (_, size, _) in zip(STEPS, programs, strict=True)}
        runs[name] = programs[1][0]
    rows = interleaved(runs, rounds, reference="checkpoint")
    rows = {name: sizes[name] | {f"ratio_at_{STEPS[1]}": rows[name]["ratio"]} for name in runs}
    settings = {"width": WIDTH, "heads": HEADS, "sequence": SEQUENCE, "batch": BATCH, "solver": "euler"}
    report("adjoints", settings, rows)


def compile_time(rounds: int) -> None:
    """Seconds from tracing to the compiled gradient, at 6 and at 48 steps, in turn."""
    rows = {}
    for name, (weights, depth) in CASES.items():
        pairs = [[compiled(weights, steps, **depth)[2] for steps in (6, 48)] for _ in range(rounds)]
        ratios = sorted(long / short for short, long in pairs)
        short, long = (sorted(times)[len(times) // 2] for times in zip(*pairs, strict=True))
        rows[name] = {"seconds_6": short, "seconds_48": long, "ratio": ratios[len(ratios) // 2]}
    report("compile_time", {"width": WIDTH, "sequence": SEQUENCE, "batch": BATCH}, rows)


def main(rounds: int = 7) -> None:
    memory(rounds)
    compile_time(5)


if __name__ == "__main__":
    main()
