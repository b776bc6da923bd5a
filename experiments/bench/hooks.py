"""The cost of hooks: a forward pass, the same recording its states, recording all places, and editing one step.

At the width of GPT-2 small, for a flow and for ordinary layers. All are compiled as a whole; arrays stay on the device.
"""

import equinox as eqx

from experiments.bench.frame import Benchmark, Call, Rows, interleaved, run
from experiments.bench.gradients import SMALL, build, example, flow
from qkvflow import lens
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import PerLayerConfig

WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 768, 12, 4, 128, 2
_ORDINARY = Gpt2BlockConfig(num_heads=HEADS, form="sequential")
CONFIGS = {
    "flow": flow(WIDTH, SEQUENCE, SMALL, Gpt2BlockConfig(num_heads=HEADS), steps=LAYERS),
    "layers": flow(WIDTH, SEQUENCE, PerLayerConfig(), _ORDINARY, steps=LAYERS, step_size="residual"),
}


def calls(config: NeuralOdeConfig) -> dict[str, Call]:
    model, tokens = build(config), example(SEQUENCE, BATCH).tokens
    plain = eqx.filter_jit(lambda model: model(tokens))
    cached = eqx.filter_jit(lambda model, names: lens.run_with_cache(model, tokens, names))
    edited = eqx.filter_jit(lambda model: lens.run_with_edits(model, tokens, {"1.mlp.out": lambda x: x * 0.5}))
    return {
        "forward": lambda: plain(model).array,
        "states": lambda: cached(model, "state.*"),
        "all places": lambda: cached(model, "*"),
        "an edit": lambda: edited(model).array,
    }


def measure() -> Rows:
    return {
        f"{kind}: {name}": row
        for kind, config in CONFIGS.items()
        for name, row in interleaved(calls(config), 7).items()
    }


SETTINGS = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "sequence": SEQUENCE, "batch": BATCH}
BENCHMARKS = (Benchmark("hooks", SETTINGS, measure),)

if __name__ == "__main__":
    run(BENCHMARKS)
