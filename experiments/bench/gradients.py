"""Losses and gradients: compared with Levanter's GPT-2, of time-indexed SSMs, by each adjoint, and by plain diffrax.

- `training_step`: per-layer weights (the ordinary transformer in qkvflow) are between Levanter's GPT-2 of the same
  shape and the neural ODE transformer: the first difference is qkvflow's overhead, the second is the cost of generating
  the weights, or of summing K basis functions.
- `ssm`: at two lengths; growth is measured for the mixer alone, since attention, which every block has, is quadratic.
- `adjoints`: constant weights show the states alone; generated weights, `batched` and `in_scan`, what W(t) adds. Memory
  is XLA's own count of temporary memory.
- `general_path`: adaptive steps.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import optax
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmConfig, LmExample

from experiments.bench.frame import Benchmark, Call, Rows, interleaved, run
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig, SsmMixer
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import BasisConfig, ConstantConfig, GeneratedConfig, ModulatedConfig, PerLayerConfig, at

HEADS = 4
Vocab = hax.Axis("vocab", 257)
GENERATED = GeneratedConfig(time_embed_dim=64, sinusoidal_dim=32)
BASIS = BasisConfig(dim=4)
SMALL = GeneratedConfig(time_embed_dim=16, sinusoidal_dim=32)


def flow(width: int, sequence: int, weights=GENERATED, block=None, **depth) -> NeuralOdeConfig:
    """depth: keys of `DepthConfig`."""
    block, depth = block or Gpt2BlockConfig(num_heads=HEADS), DepthConfig(**{"solver": "euler", **depth})
    return NeuralOdeConfig(max_seq_len=sequence, hidden_dim=width, block=block, weights=weights, depth=depth)


def build(config: LmConfig, vocab: hax.Axis = Vocab):
    return config.build(vocab, key=jax.random.PRNGKey(0))


def example(sequence: int, batch: int) -> LmExample:
    Batch, Pos = hax.Axis("batch", batch), hax.Axis("position", sequence)
    tokens = hax.random.randint(jax.random.PRNGKey(0), (Batch, Pos), 0, Vocab.size)
    weight = LmExample.causal_loss_mask(Pos).astype(jnp.float32).broadcast_axis(Batch)
    return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())


def loss(
    config: LmConfig, batch: int, policy: str = "p=f32,c=f32", vocab: hax.Axis = Vocab
) -> tuple[Callable[[Any], tuple[jax.Array, Any]], Any]:
    """Loss and parameter gradients, at the model's full length; and the initial parameters, in fp32."""
    params, static = eqx.partition(build(config, vocab), eqx.is_inexact_array)
    data, mp = example(config.max_seq_len, batch), jmp.get_policy(policy)

    def of(params):
        return eqx.combine(mp.cast_to_compute(params), static).compute_next_token_loss(data).scalar()

    return jax.value_and_grad(of), params


def gradient(config: LmConfig, batch: int) -> Call:
    """A call that computes loss and gradients once."""
    compute, params = loss(config, batch)
    compiled = jax.jit(compute)
    return lambda: compiled(params)


def step(config: LmConfig, batch: int, policy: str = "p=f32,c=f32", vocab: hax.Axis = Vocab) -> tuple[Call, int]:
    """(a call that runs one whole Adam step with donated buffers, bytes that the device needs for it)."""
    (compute, params), optimizer = loss(config, batch, policy, vocab), optax.adamw(1e-4)

    def update(carry):
        params, state = carry
        value, grads = compute(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry = [(params, optimizer.init(params))]
    program = jax.jit(update, donate_argnums=0).lower(carry[0]).compile()
    memory = program.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def run():
        carry[0], value = program(carry[0])
        return carry[0], value

    return run, needed + memory.temp_size_in_bytes


def training(name: str, make: Callable[[LmConfig, int], Call]) -> Benchmark:
    """The same optimizer and data for all models."""
    width, layers, sequence, batch = 256, 6, 128, 8
    shape = {"max_seq_len": sequence, "hidden_dim": width, "num_heads": HEADS, "num_layers": layers}
    models = {
        "levanter gpt2": Gpt2Config(**shape),
        "per layer": flow(width, sequence, PerLayerConfig(), steps=layers),
        "generated, in scan": flow(width, sequence, steps=layers, evaluate="in_scan"),
        "generated, batched": flow(width, sequence, steps=layers, evaluate="batched"),
        "generated, rk4": flow(width, sequence, steps=layers, solver="rk4"),
        "basis, in scan": flow(width, sequence, BASIS, steps=layers, evaluate="in_scan"),
        "basis, batched": flow(width, sequence, BASIS, steps=layers, evaluate="batched"),
    }
    settings = {"width": width, "heads": HEADS, "layers": layers, "sequence": sequence, "batch": batch}
    settings |= {"T": GENERATED.time_embed_dim, "S": GENERATED.sinusoidal_dim, "K": BASIS.dim}
    return Benchmark(name, settings, lambda: interleaved({name: make(c, batch) for name, c in models.items()}))


SSM = {"width": 256, "heads": HEADS, "layers": 6, "tokens": 1024}
BLOCKS = {
    "time-indexed MLP": Gpt2BlockConfig(num_heads=HEADS, form="sequential"),
    "SSM, 16 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=16),
    "SSM, 64 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=64),
    "selective, 16 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=16, selective=True),
}


def ssm(sequence: int) -> Benchmark:
    """Blocks of time-indexed SSMs, and of the time-indexed MLP."""
    batch, weights = SSM["tokens"] // sequence, ModulatedConfig(hidden_dim=64, sinusoidal_dim=32)

    def of(block) -> Call:
        depth = {"steps": SSM["layers"], "step_size": "residual"}
        return gradient(flow(SSM["width"], sequence, weights, block, **depth), batch)

    settings = SSM | {"sequence": sequence, "batch": batch}
    return Benchmark(f"ssm_{sequence}", settings, lambda: interleaved({n: of(b) for n, b in BLOCKS.items()}))


def growth(kind: str, selective: bool) -> Benchmark:
    """Growth of one mixer's time with the length of its single sequence."""

    def mixer(sequence: int) -> Call:
        key, Embed = jax.random.PRNGKey(0), hax.Axis("embed", SSM["width"])
        mixer = SsmMixer.init(Embed, hax.Axis("state", 16), selective=selective, key=key)
        x = hax.random.normal(key, (hax.Axis("batch", 1), hax.Axis("position", sequence), Embed))
        compute = eqx.filter_jit(eqx.filter_grad(lambda both: hax.mean(hax.square(both[0](both[1], None))).array))
        return lambda: compute((mixer, x))

    settings, lengths = {"width": SSM["width"], "states": 16, "batch": 1}, (512, 1024, 2048, 4096)
    return Benchmark(f"ssm_growth_{kind}", settings, lambda: interleaved({str(n): mixer(n) for n in lengths}))


ADJOINTS = {"width": 128, "heads": HEADS, "sequence": 128, "batch": 8}
STEPS = (8, 16, 32, 64)
CASES = {
    "checkpoint": (ConstantConfig(), {}),
    "selective": (ConstantConfig(), {"adjoint": "selective"}),
    "direct": (ConstantConfig(), {"adjoint": "direct"}),
    "reversible": (ConstantConfig(), {"adjoint": "reversible"}),
    "backsolve": (ConstantConfig(), {"adjoint": "backsolve", "endpoint": "left"}),
    "checkpoint, generated, batched": (SMALL, {"evaluate": "batched"}),
    "reversible, generated, batched": (SMALL, {"adjoint": "reversible", "evaluate": "batched"}),
    "reversible, generated, in scan": (SMALL, {"adjoint": "reversible", "evaluate": "in_scan"}),
}


def compiled(weights, steps: int, **depth) -> tuple[Call, int, float]:
    """(a call that computes loss and gradients once, bytes of temporary memory, seconds of compilation)."""
    config = flow(ADJOINTS["width"], ADJOINTS["sequence"], weights, steps=steps, **depth)
    compute, params = loss(config, ADJOINTS["batch"])
    start = time.perf_counter()
    program = jax.jit(compute).lower(params).compile()
    taken = time.perf_counter() - start
    return (lambda: program(params)), program.memory_analysis().temp_size_in_bytes, taken


def memory() -> Rows:
    """Memory by number of steps, and the time with STEPS[1] of them."""
    programs = {name: [compiled(weights, n, **depth) for n in STEPS] for name, (weights, depth) in CASES.items()}
    times = interleaved({name: own[1][0] for name, own in programs.items()}, 7)
    return {
        name: {f"MiB_{n}": size / 2**20 for n, (_, size, _) in zip(STEPS, own, strict=True)}
        | {f"ratio_at_{STEPS[1]}": times[name]["ratio"]}
        for name, own in programs.items()
    }


def compile_time() -> Rows:
    """Seconds from tracing to the compiled gradient, with 6 and with 48 steps, in turn."""
    rows = {}
    for name, (weights, depth) in CASES.items():
        pairs = [[compiled(weights, steps, **depth)[2] for steps in (6, 48)] for _ in range(5)]
        short, long = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(long / short for short, long in pairs)
        rows[name] = {"seconds_6": short, "seconds_48": long, "ratio": ratio}
    return rows


GENERAL = {"width": 128, "sequence": 128, "batch": 4, "solver": "tsit5", "rtol": 1e-3}
INPUTS = Inputs.of()


def by_hand(flow, x):
    def field(t, y, weights):
        return at(weights, t)(hax.named(y, x.axes), INPUTS).rearrange(x.axes).array

    term, controller = diffrax.ODETerm(field), diffrax.PIDController(rtol=GENERAL["rtol"], atol=GENERAL["rtol"])
    times, options = (0.0, 1.0, 1 / 12), {"stepsize_controller": controller, "max_steps": 256}
    solution = diffrax.diffeqsolve(term, diffrax.Tsit5(), *times, x.array, flow.weights, **options)
    assert solution.ys is not None
    return hax.named(solution.ys[0], x.axes)


def solving(solve) -> Call:
    """A call that computes a loss of x(1), and its gradients with respect to the weights and x(0)."""
    depth = {"solver": GENERAL["solver"], "steps": 12, "rtol": GENERAL["rtol"]}
    whole = build(flow(GENERAL["width"], GENERAL["sequence"], SMALL, **depth))
    x = whole.embeddings(example(GENERAL["sequence"], GENERAL["batch"]).tokens)
    compute = eqx.filter_jit(eqx.filter_value_and_grad(lambda both: hax.mean(hax.square(solve(*both))).scalar()))
    return lambda: compute((whole.transformer.flow, x))


def general_path() -> Rows:
    return interleaved({"diffrax": solving(by_hand), "general path": solving(lambda flow, x: flow(x, INPUTS))}, 9)


BENCHMARKS = (
    training("forward_backward", gradient),
    training("training_step", lambda config, batch: step(config, batch)[0]),
    Benchmark("adjoints", ADJOINTS | {"solver": "euler"}, memory),
    Benchmark("compile_time", {key: ADJOINTS[key] for key in ("width", "sequence", "batch")}, compile_time),
    Benchmark("general_path", GENERAL, general_path),
    ssm(128),
    ssm(1024),
    growth("time_invariant", selective=False),
    growth("selective", selective=True),
)

if __name__ == "__main__":
    run(BENCHMARKS)
