"""What a language model costs, from its shapes alone: parameters by group, FLOPs, memory of cached generation.

Takes models in our form (`qkvflow.models.levanter_twin.enter`). They may come from `equinox.filter_eval_shape`, so the
largest ones can be described without being allocated.
"""

from dataclasses import dataclass

import equinox as eqx
import jax

from qkvflow.models.config import NeuralOdeConfig
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.weights import evaluation_flops

GROUPS = ("embeddings", "prelude", "flow", "coda", "norm", "head", "other")


@dataclass(frozen=True)
class Flops:
    """Floating point operations, multiplications and additions counted one each.

    Counts matrix products (including those of attention over the whole context, as all kernels except block-sparse ones
    compute it) and the generation of weights, but not norms, activations and softmax. Checked against XLA's count in
    tests/models/test_cost.py. A matrix product costs twice its forward FLOPs in the backward pass.

    Attributes:
        forward, backward: per token, head included.
        recomputed: per token; what is evaluated again in the backward pass, at most (products that the gradient does
            not need, such as output projections, are skipped).
        generation: of W(t) at all times of the grid, once per batch, forward; the backward pass takes twice that, and
            once more where W(t) is computed within checkpointed steps (`in_scan`).
    """

    forward: float
    backward: float
    recomputed: float
    generation: float


def parameters_by_group(model: NeuralOdeLMHeadModel) -> dict[str, int]:
    """Number of parameters in each of GROUPS; they sum to the total. A tied head has none of its own.

    `flow` is the stack of layers of an ordinary model.
    """
    counts = dict.fromkeys(GROUPS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if hasattr(leaf, "size"):
            counts[_group(path)] += leaf.size
    return counts


def discretised(model: NeuralOdeLMHeadModel) -> NeuralOdeLMHeadModel:
    """Shapes of the ordinary model that a flow becomes at its own depth."""
    return eqx.filter_eval_shape(lambda m: m.discretise(), model)


def flops(config: NeuralOdeConfig, model: NeuralOdeLMHeadModel, vocab_size: int, context_length: int) -> Flops | None:
    """FLOPs outside training, at `context_length` tokens; None if the number of steps depends on the data."""
    forward, plan = config.reading.flops_per_token(vocab_size, context_length), config.plan
    if forward is None or plan.recomputed is None or plan.weight_evaluations is None:
        return None
    again = config.block.flops_per_token(config.hidden_dim, context_length)
    if plan.keeps_products:  # products between positions, recurrences and convolutions are made again
        again -= config.block.flops_of_products(config.hidden_dim)
    ordinary = (config.prelude_layers + config.coda_layers) * config.gradient_checkpointing
    recomputed = float(again * (ordinary + plan.recomputed))
    generation = plan.weight_evaluations * evaluation_flops(model.transformer.flow.weights)
    return Flops(float(forward), 2 * float(forward), recomputed, generation)


def evaluations(config: NeuralOdeConfig) -> int | None:
    """Evaluations of B per token; None if unknown, as with adaptive steps."""
    flow = config.plan.evaluations
    return None if flow is None else flow + config.prelude_layers + config.coda_layers


def kv_cache_width(config: NeuralOdeConfig) -> int | None:
    """Numbers that cached generation keeps per token: keys and values of every evaluation of B. None if unknown.

    Each stage of the solver sees different states, so each needs its own: Euler L, RK4 4 L; prelude and coda 1 per
    layer. What does not grow with the number of tokens (the state of a state-space model) is not counted.
    """
    count = evaluations(config)
    return None if count is None else count * config.block.kv_cache_width(config.hidden_dim)


def _group(path) -> str:
    """The first two names on the way to an array say where it belongs."""
    names = [key.name for key in path if hasattr(key, "name")]
    if names[0] == "transformer":
        return names[1] if len(names) > 1 and names[1] in GROUPS else "other"
    return {"embeddings": "embeddings", "lm_head": "head"}.get(names[0], "other")
