"""Order of convergence of every solver: on a linear field with a known solution, and on a trained flow."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from scipy.linalg import expm
from support.depth import ORDER, plan, times_of
from support.quickstart import train

from qkvflow.blocks import Inputs
from qkvflow.runs import load_run
from qkvflow.time import Grid, GridPoint
from qkvflow.weights import evaluate

WITHIN = 0.2


def order(solver, error_of, steps) -> float:
    """p of the regression log error = c + p log h + q h; the last term is what the next order adds (dopri8's errors
    span too few step sizes for it: q = 0)."""
    h = 1 / np.asarray(steps)
    errors = np.asarray([error_of(n) for n in steps])
    assert errors.min() > 1e-15, "rounding hides the order"
    terms = [np.log(h), np.ones_like(h)] + [h] * (ORDER[solver] < 8)
    return np.linalg.lstsq(np.stack(terms, axis=1), np.log(errors))[0][0]


@pytest.mark.parametrize("solver", list(ORDER))
def test_linear_field(solver):
    """dx/dt = A x, x(1) = exp(A) x(0), in float64."""
    A = np.random.default_rng(3).normal(size=(6, 6))
    A = A - A.T + 0.2 * A
    x0 = np.random.default_rng(4).normal(size=6)
    steps = {1: (64, 128, 256, 512), 5: (32, 40, 48, 64), 8: (4, 6, 8, 10)}.get(ORDER[solver], (32, 48, 64, 128))
    with jax.enable_x64(True):
        matrix = hax.named(jnp.asarray(A), ("out", "embed"))
        x = hax.named(jnp.asarray(x0), Axis("embed", 6))

        def field(t, x, args, key):
            return hax.dot(matrix, x, axis="embed").rename({"out": "embed"})

        def error(n):
            return float(np.abs(plan(solver, n).solve(field, times_of, None, x).end.array - expm(A) @ x0).max())

        check(solver, order(solver, error, steps))


def check(solver, found):
    """Within 0.2; for dopri8 at least that: its errors reach the rounding of float64 while higher terms still lead."""
    assert found > ORDER[solver] - WITHIN, f"{solver}: {found}"
    assert ORDER[solver] == 8 or found < ORDER[solver] + WITHIN, f"{solver}: {found}"


@pytest.mark.slow
@pytest.mark.program
def test_trained_flow(tmp_path):
    """A flow with the paper's time features after 60 steps of training, in float64, over a window of layer-time.

    Trained weights move with sin(1000 t) and its harmonics: a step must be far below 1/1000 before errors follow the
    order, so a window of some thousandths is divided instead of [0, 1]. The field and W(t) are the same.
    """
    features = {"time_embed_dim": 16, "sinusoidal_dim": 32, "time_scale": 1000}
    changes = {"trainer.num_train_steps": 60, "model.embedding_multiplier": 1}
    changes |= {f"model.weights.{key}": value for key, value in features.items()}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    _, model, tokenizer = load_run(train(tmp_path, "run", *words))
    with jax.enable_x64(True):
        model = jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, model)
        tokens = hax.named(jnp.asarray([tokenizer.encode("The for statement is")]), ("batch", "position"))
        x0, weights = model.embeddings(tokens), model.transformer.flow.weights
        found = {}
        for solver, nominal in ORDER.items():
            length = 0.0005 if nominal > 4 else 0.002
            steps = {1: (64, 96, 128, 256), 5: (12, 16, 24, 32), 8: (3, 4, 5)}.get(nominal, (32, 48, 64, 96))

            def inside(weights, t, length=length):
                values = tuple(0.3 + length * s for s in t.values)
                return evaluate(weights, Grid(values, t.axis) if isinstance(t, Grid) else GridPoint(values, t.index))

            def field(block, x, args, key, length=length):
                return length * block(x, args)

            @eqx.filter_jit
            def end(weights, x, plan, field=field, inside=inside):
                return plan.solve(field, inside, weights, x, args=Inputs.of()).end.array

            reference = end(weights, x0, plan("dopri8", 100))

            def error(n, solver=solver, end=end, reference=reference):
                difference = end(weights, x0, plan(solver, n, endpoint="left")) - reference
                return float(jnp.sqrt(jnp.mean(jnp.square(difference))))

            found[solver] = order(solver, error, steps)
    for solver, p in found.items():
        check(solver, p)
