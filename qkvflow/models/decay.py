"""Which leaves weight decay acts on: a named choice (`weight_decay_on`), by the role of each array in the model.

| choice                    | roles that decay                                                                     |
|---------------------------|--------------------------------------------------------------------------------------|
| `matrices` (default)      | matrix: weights of linear maps; generated: projection and base; modulated: base      |
| `matrices_and_embeddings` | matrix, embedding: what nanoGPT does for GPT-2                                       |
| `embeddings`              | embedding: what the official code does for its GPT-2 flow                            |
| `all`                     | everything: what the official code does for its Llama flow                           |
| `levanter`                | what Levanter decides by names of classes and fields                                 |
| `none`                    | nothing                                                                              |

Rates, steps and other parameters of a state-space model are `other`: as in Mamba they do not decay by default.
Names say little about a generator (its projection and base are one matrix), so roles are
decided here by the kind of module that an array belongs to.
"""

import copy

import haliax.nn as hnn
import jax
from haliax import NamedArray
from levanter.optim import OptimizerConfig
from levanter.optim.namo import NamoConfig, NamoDConfig

from qkvflow.errors import UserError
from qkvflow.named import is_named
from qkvflow.weights.generated import TimeNetwork
from qkvflow.weights.modulated import GateNetwork

RULES: dict[str, frozenset[str]] = {
    "matrices": frozenset({"matrix"}),
    "matrices_and_embeddings": frozenset({"matrix", "embedding"}),
    "embeddings": frozenset({"embedding"}),
    "all": frozenset({"matrix", "embedding", "bias", "norm", "time_network", "other"}),
    "none": frozenset(),
}

_KINDS = (hnn.Embedding, hnn.normalization.LayerNormBase, hnn.Linear, TimeNetwork, GateNetwork)


def check_rule(rule: str) -> None:
    """Raise UserError if there is no such choice."""
    if rule != "levanter" and rule not in RULES:
        raise UserError(f"weight_decay_on: {rule!r} is not known. Choices: {', '.join([*RULES, 'levanter'])}.")


def configure(optimizer: OptimizerConfig, rule: str) -> OptimizerConfig:
    """The same optimizer configuration, with the decay of `rule`."""
    check_rule(rule)
    if rule == "levanter":
        return optimizer
    if optimizer.weight_decay_modules is not None or optimizer.default_weight_decay_mask is not None:
        raise UserError(
            f"optimizer.weight_decay_modules and default_weight_decay_mask conflict with weight_decay_on: {rule}."
            " Remove them, or set weight_decay_on: levanter to use them."
        )
    if isinstance(optimizer, NamoConfig | NamoDConfig) and optimizer.weight_decay and "matrix" not in RULES[rule]:
        raise UserError(
            f"weight_decay_on: {rule} cannot keep optimizer.type: {optimizer.get_choice_name(type(optimizer))} from"
            " decaying the matrices, which is part of its step."
            " Set optimizer.weight_decay: 0, or weight_decay_on: matrices."
        )
    optimizer = copy.copy(optimizer)
    # Levanter builds its mask in a method that has no parameters; a frozen dataclass can still carry another one.
    object.__setattr__(optimizer, "build_weight_decay_mask", lambda: lambda model: mask(model, rule))
    return optimizer


def mask(model, rule: str):
    """A tree like `model` with a bool for each array: whether it decays."""
    return jax.tree.map(lambda role: role in RULES[rule], roles(model))


def roles(model):
    """A tree like `model` with the role of each array: matrix, bias, norm, embedding, time_network or other."""
    return jax.tree.map(_role, model, is_leaf=lambda x: isinstance(x, (*_KINDS, NamedArray)))


def _role(node):
    if isinstance(node, hnn.Embedding):
        return _fill(node, "embedding")
    if isinstance(node, hnn.normalization.LayerNormBase):
        return _fill(node, "norm")
    if isinstance(node, (TimeNetwork, GateNetwork)):
        return _fill(node, "time_network")
    if isinstance(node, hnn.Linear):
        # `weight` and `bias` are arrays, or the functions of time that stand for them.
        paths = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_named)
        names = ["bias" if path[0].name == "bias" else "matrix" for path, _ in paths]
        return jax.tree.unflatten(jax.tree.structure(node, is_leaf=is_named), names)
    return "other"


def _fill(node, role: str):
    return jax.tree.map(lambda _: role, node, is_leaf=is_named)
