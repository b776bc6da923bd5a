"""How the time per token follows its evaluations, by width; and what a pass over drafts costs.

Untrained flows of 12 steps and one text; thresholds make tokens exit at different depths. `evaluations` is the mean
share of the 12 evaluations, `ratio` the time relative to plain decoding, `over` the excess of the time over that share.
The ratio of a pass over 4 drafts at 3 steps is its cost in plain tokens: it pays if a pass yields more tokens.
"""

import functools
from collections.abc import Callable

from levanter.utils.tree_utils import inference_mode

from experiments.bench.frame import Benchmark, Rows, interleaved, run
from experiments.bench.generation import engine_at
from experiments.bench.gradients import build
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.generation import Engine
from qkvflow.generation.drafting import Drafting
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel
from qkvflow.models.exits import ExitConfig
from qkvflow.weights import BasisConfig

WIDTHS, STEPS, CONTEXT = (128, 256, 512, 768), 12, 64
THRESHOLDS, DRAFTING = (0.5, 1.2, 2.5), Drafting(3, 4)
NEW, ROUNDS = 8, 9  # tokens, or passes, of one timed run, which continues where the previous one ended


def model(width: int) -> NeuralOdeLMHeadModel:
    """An untrained flow with heads of 32."""
    block, weights = Gpt2BlockConfig(num_heads=width // 32), BasisConfig(basis="chebyshev", dim=4)
    depth = DepthConfig(steps=STEPS, endpoint="right")
    return inference_mode(build(NeuralOdeConfig(1024, width, block=block, weights=weights, depth=depth)), True)


def at_width(width: int, rounds: int = ROUNDS) -> Rows:
    """Plain decoding, exits by each threshold, and passes over drafts."""
    flow = model(width)
    engine = functools.partial(engine_at, flow, CONTEXT, 1024 - CONTEXT)
    exits = {t: engine(exits=ExitConfig("velocity", t)) for t in THRESHOLDS}
    engines = {"plain": engine()} | {f"velocity below {t:g}": own for t, own in exits.items()}
    engines["a pass over 4 drafts"] = engine(drafting=DRAFTING)

    def decoding(own: Engine) -> Callable[[], object]:
        return lambda: own.decode(NEW)

    before = {name: own.exited() for name, own in engines.items()}  # after the prompt
    rows = {}
    for name, row in interleaved({name: decoding(own) for name, own in engines.items()}, rounds).items():
        rows[f"width {width}, {name}"] = found = dict(row)
        exited, first = engines[name].exited(), before[name]
        if exited is not None and first is not None:
            found["evaluations"] = (exited - first).mean / STEPS
            found["over"] = row["ratio"] / found["evaluations"] - 1
    return rows


def measure() -> Rows:
    return {name: row for width in WIDTHS for name, row in at_width(width).items()}


SETTINGS = {"steps": STEPS, "heads of": 32, "batch": 1, "new tokens": NEW, "context": CONTEXT}
BENCHMARKS = (Benchmark("exits_by_width", SETTINGS, measure),)

if __name__ == "__main__":
    run(BENCHMARKS)
