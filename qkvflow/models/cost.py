"""What a language model costs, from its shapes alone: parameters by group, FLOPs, memory of cached generation.

Works for qkvflow's own models and for Levanter's; models may come from `equinox.filter_eval_shape`, so that the
largest ones are described without being allocated.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
from levanter.models.lm_model import LmConfig, LmHeadModel

from qkvflow.depth import GeneralPlan, Plan
from qkvflow.models.config import NeuralOdeConfig
from qkvflow.weights import evaluation_flops

GROUPS = ("embeddings", "prelude", "flow", "coda", "norm", "head", "other")

# The first two names on the way to an array say where it belongs; `blocks`, `layers`: the stacks of Levanter's models.
_GROUP_OF = {"embeddings": "embeddings", "lm_head": "head"}
_GROUP_IN_TRANSFORMER = {
    "prelude": "prelude",
    "flow": "flow",
    "blocks": "flow",
    "layers": "flow",
    "coda": "coda",
    "norm": "norm",
    "ln_f": "norm",
}

# How often the backward pass makes the evaluations of B again, by adjoint.
_RECOMPUTED = {"direct": 0, "checkpoint": 1, "reversible": 1, "backsolve": 1}


@dataclass(frozen=True)
class Flops:
    """Floating point operations, multiplications and additions counted one each.

    Counted are the products of matrices (also those of attention, over the whole context, as all kernels but
    block-sparse ones compute it) and the generation of weights; norms, activations and softmax are left out. Checked
    against XLA's count in tests/models/test_cost.py. A matrix product costs twice its forward FLOPs in the backward
    pass.

    forward, backward: per token, head included.
    recomputed: per token; what is evaluated again in the backward pass, at most (products that the gradient does not
        need, such as output projections, are skipped). None if unknown.
    generation: of W(t) at all times of the grid, once per batch, forward; the backward pass takes twice that, and once
        more where W(t) is computed within checkpointed steps (`in_scan`).
    """

    forward: float
    backward: float
    recomputed: float | None
    generation: float


def parameters_by_group(model: LmHeadModel) -> dict[str, int]:
    """Number of parameters in each of GROUPS; they sum to the total. A tied head has none of its own.

    `flow` is the stack of layers of an ordinary model.
    """
    counts = dict.fromkeys(GROUPS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if hasattr(leaf, "size"):
            counts[_group(path)] += leaf.size
    return counts


def discretised(model: LmHeadModel) -> LmHeadModel:
    """Shapes of the ordinary model that a flow becomes at its own depth; an ordinary model as it is."""
    is_flow = isinstance(model.config, NeuralOdeConfig)
    return eqx.filter_eval_shape(lambda m: m.discretise(), model) if is_flow else model


def flops(config: LmConfig, model: LmHeadModel, vocab_size: int, context_length: int) -> Flops | None:
    """FLOPs of a model at sequences of `context_length` tokens; None if there is no formula for it (some of Levanter's
    models), or if the number of steps depends on the data (adaptive)."""
    forward = config.flops_per_token(vocab_size, context_length)
    if forward is None:
        return None
    forward = float(forward)
    if not isinstance(config, NeuralOdeConfig):
        head = 2 * model.Embed.size * vocab_size
        again = getattr(config, "gradient_checkpointing", None)
        recomputed = {True: forward - head, False: 0.0}.get(again) if isinstance(again, bool) else None
        return Flops(forward, 2 * forward, recomputed, 0.0)
    block = config.block.flops_per_token(config.hidden_dim, context_length)
    ordinary = (config.prelude_layers + config.coda_layers) * config.gradient_checkpointing
    again = _RECOMPUTED[config.depth.adjoint] * config.plan.evaluations
    recomputed = float(block * (ordinary + again))
    generation = _weight_evaluations(config.plan) * evaluation_flops(model.transformer.flow.weights)
    return Flops(forward, 2 * forward, recomputed, generation)


def evaluations(config: LmConfig) -> int | None:
    """Evaluations of B, or layers, that a token passes; None if unknown, as with adaptive steps."""
    if isinstance(config, NeuralOdeConfig):
        flow = config.plan.evaluations  # None: adaptive steps
        return None if flow is None else flow + config.prelude_layers + config.coda_layers
    return getattr(config, "num_layers", None)


def kv_cache_width(config: LmConfig) -> int | None:
    """Numbers that cached generation keeps per token: keys and values of every evaluation of B. None if unknown.

    Each stage of the solver sees other states, so each needs its own: Euler L, RK4 4 L; prelude and coda 1 per layer.
    What does not grow with the number of tokens (the state of a state-space model) is not counted.
    """
    count = evaluations(config)
    if count is None:
        return None
    if isinstance(config, NeuralOdeConfig):
        return count * config.block.kv_cache_width(config.hidden_dim)
    heads = getattr(config, "num_kv_heads", None) or getattr(config, "num_heads", None)
    if heads is None:
        return None
    head_size = getattr(config, "head_dim", None) or config.Embed.size // config.num_heads
    return count * 2 * heads * head_size


def _weight_evaluations(plan: Plan | GeneralPlan) -> int:
    """How many times W(t) is computed forward: once per distinct time, or in each step for each place within it."""
    if isinstance(plan, GeneralPlan):
        return plan.evaluations
    return len(plan.times) if plan.evaluate == "batched" else plan.steps * len(plan.places)


def _group(path) -> str:
    names = [key.name for key in path if hasattr(key, "name")]
    if names[0] == "transformer" and len(names) > 1:
        return _GROUP_IN_TRANSFORMER.get(names[1], "other")
    return _GROUP_OF.get(names[0], "other")
