"""One device in minutes: `python -m experiments.bench.device`, on a TPU or GPU (or, small, on a CPU).

Training steps (Adam, donated buffers, bf16 and fp32) of Levanter's GPT-2, of the same transformer in qkvflow and of
the flow with each adjoint: time, memory by the compiler's count, and MFU by the chip's peak. Decoding and drafting:
tokens per second. The result is results/device_<its name>.json.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmConfig
from levanter.utils.tree_utils import inference_mode

from experiments.bench import gradients
from experiments.bench.frame import Benchmark, Call, Row, Rows, interleaved, run
from experiments.bench.gradients import build
from experiments.records import device_name
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.generation import SamplingOptions
from qkvflow.generation.drafting import Drafting
from qkvflow.generation.prepare import PreparedModel
from qkvflow.meshes.chips import CHIPS
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig, PerLayerConfig

ROUNDS = 7
BASELINE = "levanter gpt2"
POLICIES = {"bf16": "p=f32,c=bf16", "fp32": "p=f32,c=f32"}


@dataclass(frozen=True)
class Size:
    """Sizes of the benchmark; tokens: new ones in a timed decode."""

    width: int
    heads: int
    layers: int
    sequence: int
    batch: int
    vocab: int
    time_embed_dim: int = 20
    tokens: int = 32


LARGE = Size(768, 12, 12, 1024, 8, 50304)  # GPT-2 small
SMALL = Size(64, 4, 4, 64, 2, 257, tokens=8)


def peak_flops(precision: str = "bf16") -> float | None:
    """Peak FLOPs of this device in bf16 or fp32; None if it is not in the table of chips."""
    kind = jax.devices()[0].device_kind.lower()
    names = {"v4": "v4", "v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6": "v6e"} | {k: k for k in CHIPS}
    found = next((CHIPS[chip] for mark, chip in names.items() if mark in kind), None)
    return found and (found.flops if precision == "bf16" else found.flops_fp32)


def models(size: Size) -> dict[str, LmConfig]:
    """Levanter's GPT-2 first: all others are compared with it."""

    def flow(weights, **depth) -> NeuralOdeConfig:
        block = Gpt2BlockConfig(num_heads=size.heads)
        return gradients.flow(size.width, size.sequence, weights, block, steps=size.layers, **depth)

    generated = GeneratedConfig(time_embed_dim=size.time_embed_dim)
    shape = {"hidden_dim": size.width, "num_heads": size.heads, "num_layers": size.layers}
    return {
        BASELINE: Gpt2Config(max_seq_len=size.sequence, **shape),
        "per layer": flow(PerLayerConfig()),
        "flow, checkpoint": flow(generated),
        "flow, checkpoint, in scan": flow(generated, evaluate="in_scan"),
        "flow, selective": flow(generated, adjoint="selective"),
        "flow, direct": flow(generated, adjoint="direct"),
        "flow, reversible": flow(generated, adjoint="reversible"),
        "flow, backsolve": flow(generated, adjoint="backsolve", endpoint="left"),
    }


def training_step(config: LmConfig, size: Size, policy: str) -> tuple[Call, int]:
    """(a call that runs one Adam step, bytes that the device needs for it)."""
    return gradients.step(config, size.batch, policy, hax.Axis("vocab", size.vocab))


def training(size: Size) -> Iterator[Row]:
    """Rows by model and precision. Each model is measured in turn with Levanter's GPT-2, and freed before the next. A
    model that does not fit into memory is left out, with a message."""
    for name, policy in POLICIES.items():
        with _if_it_fits(f"all of {name}"):
            first = training_step(models(size)[BASELINE], size, policy)
            for model in models(size):
                with _if_it_fits(f"{model}, {name}"):
                    yield f"{model}, {name}", _against(first, model, size, name)


@contextlib.contextmanager
def _if_it_fits(what: str) -> Iterator[None]:
    """Leaves out, with a message, what the device has too little memory for."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"{what}: left out, the device has too little memory for it", flush=True)


def _against(first: tuple[Call, int], model: str, size: Size, precision: str) -> dict[str, float]:
    """The row of a model; `first`: step and memory of the baseline."""
    policy = POLICIES[precision]
    config, tokens = models(size)[model], size.batch * size.sequence
    step, needed = first if model == BASELINE else training_step(config, size, policy)
    row = interleaved({BASELINE: first[0], model: step}, ROUNDS)[model]
    found = {**row, "GiB": needed / 2**30, "tokens_per_second": tokens / row["seconds"]}
    per_token, peak = config.flops_per_token(size.vocab, size.sequence), peak_flops(precision)
    return found | ({"mfu": 3 * per_token * tokens / row["seconds"] / peak} if per_token and peak else {})


def decoding(size: Size) -> Rows:
    """New tokens per second of one text, with the time in which its prompt is read: Levanter's GPT-2 and the flow in
    qkvflow's engine, and the flow with drafts, whose coarse grid reads the prompt too; `accepted` is the share of the
    drafts of this untrained model that it accepts."""
    vocab = hax.Axis("vocab", size.vocab)
    gpt2, flow = (inference_mode(build(models(size)[name], vocab), True) for name in (BASELINE, "flow, checkpoint"))
    cases = {
        BASELINE: PreparedModel(gpt2, dtype="bf16"),
        "flow": PreparedModel(flow, dtype="bf16"),
        "flow, drafted": PreparedModel(flow, dtype="bf16", drafting=Drafting(size.layers // 2, 4)),
    }
    prompt = (np.arange(size.sequence // 4) * 7 % size.vocab).tolist()

    accepted: dict[str, float] = {}

    def decoder(name: str, prepared: PreparedModel) -> Callable[[], object]:
        engine = prepared.engine(1, size.sequence)

        def decode():
            engine.admit(0, prompt, size.tokens, SamplingOptions())
            engine.prefill_all(len(prompt) - 1)
            engine.wait()
            step = engine.decode(size.tokens)
            for one in step.drafted:
                accepted[name] = one.accepted / max(1, one.proposed)
            return jnp.asarray(step.length)

        return decode

    rows = interleaved({name: decoder(name, prepared) for name, prepared in cases.items()}, ROUNDS)
    share = {name: {"accepted": accepted[name]} if name in accepted else {} for name in rows}
    return {
        name: {**row, "tokens_per_second": size.tokens / row["seconds"], **share[name]} for name, row in rows.items()
    }


def benchmark(size: Size | None = None) -> Benchmark:
    """The benchmark of this device; by default at a size that suits it."""
    size = size or (SMALL if jax.default_backend() == "cpu" else LARGE)
    name = f"device_{re.sub('[^a-z0-9]+', '_', device_name().lower()).strip('_')}"

    def measure() -> Iterator[Row]:
        yield from training(size)
        with _if_it_fits("decoding"):
            yield from ((f"decoding: {name}", row) for name, row in decoding(size).items())

    return Benchmark(name, vars(size), measure)


if __name__ == "__main__":
    run([benchmark()])
