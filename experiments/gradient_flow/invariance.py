"""Whether what a trained model computes depends on how its middle is integrated; and whether its middle does anything.

A model's middle is read with smaller steps, or another solver, and the logits l (centred over the vocabulary, since a
constant changes no prediction) are compared with those l_0 as trained:

    divergence = ||l - l_0|| / ||l_0||          share = divergence / divergence of the model with its middle left out

A small divergence alone shows nothing: a middle that does nothing is invariant too. The share is what the reading
changes, of what there is to change. A model passes if it is below SHARE in every reading with smaller Euler steps.

Negative control: the baseline's ordinary layers x + B_k(x), k = 0..n-1, taken as a flow dx/dt = B_floor(t)(x) on [0, n]
that is read with steps of 1/m: each layer is applied m times, as x + B_k(x)/m. Nothing made them alike under that.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmExample

from qkvflow.axes import LAYERS
from qkvflow.eval_lm import displacement
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.flow import Flow
from qkvflow.weights import PerLayer

SHARE = 0.1

Loss = Callable[[NeuralOdeLMHeadModel], float]


def solver_readings(
    model: NeuralOdeLMHeadModel, solvers: Sequence[str], steps: Sequence[int], loss: Loss, example: LmExample
) -> list[dict[str, Any]]:
    """A trained flow with each solver at each number of steps: evaluations of the field, loss, displacement of the
    flow, divergence."""
    trained = centred_logits(model, example.tokens)
    found = []
    for solver in solvers:
        for n in steps:
            other = model.with_depth(model.config.depth.on_grid(n, solver=solver))
            found.append(
                {
                    "solver": solver,
                    "steps": n,
                    "evaluations": other.config.plan.evaluations,
                    "loss": loss(other),
                    "displacement": displacement(other, example),
                    "divergence": divergence(centred_logits(other, example.tokens), trained),
                }
            )
    return found


def refined_readings(
    model: NeuralOdeLMHeadModel, factors: Sequence[int], loss: Loss, example: LmExample
) -> dict[str, Any]:
    """The middle of a model with steps of 1/m of the trained length, and without it.

    Returns:
        `displacement` as trained; `left_out`: loss and divergence without the middle; `refined`: for each m loss,
        divergence and share.
    """
    trained = centred_logits(model, example.tokens)
    without = left_out(model)
    gone = divergence(centred_logits(without, example.tokens), trained)
    refined = []
    for m in factors:
        other = refine(model, m)
        moved = divergence(centred_logits(other, example.tokens), trained)
        refined.append({"factor": m, "loss": loss(other), "divergence": moved, "share": moved / gone if gone else 0.0})
    return {
        "displacement": displacement(model, example),
        "left_out": {"loss": loss(without), "divergence": gone},
        "refined": refined,
    }


def passes(readings: Mapping[str, Any]) -> bool:
    """Whether the share stays below SHARE in all refined readings. A middle that does nothing does not pass."""
    return readings["left_out"]["divergence"] > 0.0 and all(r["share"] < SHARE for r in readings["refined"])


def refine(model: NeuralOdeLMHeadModel, m: int) -> NeuralOdeLMHeadModel:
    """The same middle in Euler steps of 1/m of the trained length; of ordinary layers each is applied m times."""
    flow = model.transformer.flow
    if not isinstance(flow.weights, PerLayer):
        return model.with_depth(model.config.depth.on_grid(m * flow.plan.steps))
    grid = dataclasses.replace(flow.plan.grid, steps=m * flow.plan.steps)
    plan = dataclasses.replace(flow.plan, grid=grid, step=flow.plan.step / m)
    rows = np.repeat(np.arange(flow.plan.steps), m)
    blocks = jax.tree.map(
        lambda a: hax.take(a.rename({LAYERS: "_from"}), "_from", hax.named(rows, LAYERS)) if _is_named(a) else a,
        flow.weights.blocks.stacked,
        is_leaf=_is_named,
    )
    return _with_flow(model, Flow(PerLayer.stack(blocks, plan.times), plan, inference=flow.inference))


def left_out(model: NeuralOdeLMHeadModel) -> NeuralOdeLMHeadModel:
    """The model with x(1) = x(0): steps of length 0."""
    flow = model.transformer.flow
    return _with_flow(model, dataclasses.replace(flow, plan=dataclasses.replace(flow.plan, step=0.0)))


def centred_logits(model: NeuralOdeLMHeadModel, tokens: NamedArray, control: NamedArray | None = None) -> np.ndarray:
    """Logits [batch, position, vocab] minus their mean over the vocabulary."""
    return np.asarray(_centred(model, tokens, control))


def divergence(logits: np.ndarray, reference: np.ndarray) -> float:
    """||l - l_0|| / ||l_0|| over everything."""
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


@eqx.filter_jit
def _centred(model: NeuralOdeLMHeadModel, tokens: NamedArray, control: NamedArray | None) -> jax.Array:
    logits = model(tokens, control=control).rearrange((..., "position", "vocab")).array.astype(jnp.float32)
    return logits - logits.mean(-1, keepdims=True)


def _with_flow(model: NeuralOdeLMHeadModel, flow: Flow) -> NeuralOdeLMHeadModel:
    return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, flow=flow))


def _is_named(x: object) -> bool:
    return isinstance(x, NamedArray)
