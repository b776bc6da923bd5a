"""The general path against diffrax called by hand on the same field: adaptive steps, loss and gradient."""

import diffrax
import equinox as eqx
import haliax as hax

from experiments.bench.models import SMALL, build, example, flow
from experiments.bench.timing import interleaved, report
from qkvflow.blocks import Inputs
from qkvflow.weights import at

SETTINGS = {"width": 128, "sequence": 128, "batch": 4, "solver": "tsit5", "rtol": 1e-3}
INPUTS = Inputs.of()


def ours(flow, x):
    return flow(x, INPUTS)


def by_hand(flow, x):
    def field(t, y, weights):
        return at(weights, t)(hax.named(y, x.axes), INPUTS).rearrange(x.axes).array

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=1 / 12,
        y0=x.array,
        args=flow.weights,
        stepsize_controller=diffrax.PIDController(rtol=SETTINGS["rtol"], atol=SETTINGS["rtol"]),
        max_steps=256,
    )
    assert solution.ys is not None
    return hax.named(solution.ys[0], x.axes)


def gradient(solve):
    """A call that computes a loss of x(1), and its gradient by the weights and by x(0)."""
    depth = {"solver": SETTINGS["solver"], "steps": 12, "rtol": SETTINGS["rtol"]}
    whole = build(flow(SETTINGS["width"], SETTINGS["sequence"], SMALL, **depth))
    x = whole.embeddings(example(SETTINGS["sequence"], SETTINGS["batch"]).tokens)
    compute = eqx.filter_jit(eqx.filter_value_and_grad(lambda both: hax.mean(hax.square(solve(*both))).scalar()))
    return lambda: compute((whole.transformer.flow, x))


def main(rounds: int = 9) -> None:
    rows = interleaved({"diffrax": gradient(by_hand), "general path": gradient(ours)}, rounds, reference="diffrax")
    report("general_path", SETTINGS, rows)


if __name__ == "__main__":
    main()
