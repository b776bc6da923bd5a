"""The general path against diffrax called by hand on the same field: adaptive steps, loss and gradient."""

import diffrax
import equinox as eqx
import haliax as hax
import jax
from levanter.layers.attention import AttentionMask

from experiments.bench.timing import interleaved, report
from experiments.bench.training_step import Vocab, example
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig, at

WIDTH, HEADS, SEQUENCE, BATCH, TOLERANCE = 128, 4, 128, 4, 1e-3
MASK = AttentionMask.causal()


def model():
    return NeuralOdeConfig(
        max_seq_len=SEQUENCE,
        hidden_dim=WIDTH,
        block=Gpt2BlockConfig(num_heads=HEADS),
        weights=GeneratedConfig(time_embed_dim=16, sinusoidal_dim=32),
        depth=DepthConfig(solver="tsit5", steps=12, rtol=TOLERANCE),
    ).build(Vocab, key=jax.random.PRNGKey(0))


def ours(flow, x):
    return flow(x, MASK)


def by_hand(flow, x):
    def field(t, y, weights):
        return at(weights, t)(hax.named(y, x.axes), MASK).rearrange(x.axes).array

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=1 / 12,
        y0=x.array,
        args=flow.weights,
        stepsize_controller=diffrax.PIDController(rtol=TOLERANCE, atol=TOLERANCE),
        max_steps=256,
    )
    assert solution.ys is not None
    return hax.named(solution.ys[0], x.axes)


def gradient(solve):
    """A call that computes a loss of x(1), and its gradient by the weights and by x(0)."""
    whole = model()
    x = whole.embeddings(example(SEQUENCE, BATCH).tokens)
    compute = eqx.filter_jit(eqx.filter_value_and_grad(lambda both: hax.mean(hax.square(solve(*both))).scalar()))
    return lambda: compute((whole.transformer.flow, x))


def main(rounds: int = 9) -> None:
    rows = interleaved({"diffrax": gradient(by_hand), "general path": gradient(ours)}, rounds, reference="diffrax")
    settings = {"width": WIDTH, "sequence": SEQUENCE, "batch": BATCH, "solver": "tsit5", "rtol": TOLERANCE}
    report("general_path", settings, rows)


if __name__ == "__main__":
    main()
