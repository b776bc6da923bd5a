"""How the time of a token follows the evaluations that it makes, by width; and what a pass of drafts costs.

Untrained flows of 12 steps, whose tokens leave at different thresholds at different depths; one text. `evaluations` is
the share of 12 that a token makes, `ratio` its time beside that of plain decoding, `over` how much more than its share.
A pass with 4 drafts at 3 steps, counted in plain tokens, pays if it makes more tokens than that.
"""

from collections.abc import Callable

from levanter.utils.tree_utils import inference_mode

from experiments.bench.frame import Benchmark, Rows, interleaved, run
from experiments.bench.generation import prompt
from experiments.bench.gradients import build
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.generation import Engine, SamplingOptions
from qkvflow.generation.drafting import Drafting
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel
from qkvflow.models.exits import ExitConfig
from qkvflow.weights import BasisConfig

WIDTHS, STEPS, CONTEXT = (128, 256, 512, 768), 12, 64
THRESHOLDS, DRAFTING = (0.5, 1.2, 2.5), Drafting(3, 4)
NEW, ROUNDS = 8, 9  # tokens, or passes, of one timed run, which goes on where the one before ended


def model(width: int) -> NeuralOdeLMHeadModel:
    """An untrained flow with heads of 32."""
    block, weights = Gpt2BlockConfig(num_heads=width // 32), BasisConfig(basis="chebyshev", dim=4)
    depth = DepthConfig(steps=STEPS, endpoint="right")
    return inference_mode(build(NeuralOdeConfig(1024, width, block=block, weights=weights, depth=depth)), True)


def engine(model: NeuralOdeLMHeadModel, **options) -> Engine:
    """With a text that goes on for as long as it is timed."""
    own = PreparedModel(model, **options).engine(1, 1024)
    own.admit(0, prompt(CONTEXT), 1024 - CONTEXT, SamplingOptions())
    own.prefill_all(CONTEXT - 1)
    return own


def at_width(width: int, rounds: int = ROUNDS) -> Rows:
    """Plain decoding, exits by each threshold, and passes over drafts."""
    flow = model(width)
    exits = {t: engine(flow, exits=ExitConfig("velocity", t)) for t in THRESHOLDS}
    engines = {"plain": engine(flow)} | {f"velocity below {t:g}": own for t, own in exits.items()}
    engines["a pass over 4 drafts"] = engine(flow, drafting=DRAFTING)

    def decoding(own: Engine) -> Callable[[], object]:
        return lambda: own.decode(NEW)

    rows = {}
    for name, row in interleaved({name: decoding(own) for name, own in engines.items()}, rounds).items():
        rows[f"width {width}, {name}"] = found = dict(row)
        exited = engines[name].exited()
        if exited is not None:
            found["evaluations"] = exited.mean / STEPS
            found["over"] = row["ratio"] / found["evaluations"] - 1
    return rows


def measure() -> Rows:
    return {name: row for width in WIDTHS for name, row in at_width(width).items()}


SETTINGS = {"steps": STEPS, "heads of": 32, "batch": 1, "new tokens": NEW, "context": CONTEXT}
BENCHMARKS = (Benchmark("exits_by_width", SETTINGS, measure),)

if __name__ == "__main__":
    run(BENCHMARKS)
