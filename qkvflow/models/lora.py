"""LoRA with Levanter's adaptor: W + (alpha / r) B A for the linear maps of an ordinary model; B starts at zero.

Hu et al., arXiv 2106.09685. A: {r, In}, B: {Out, r}, one pair for each layer of a stack; the model before the first
step is the base exactly, because B = 0. Differs from Levanter's default (A zero, B random) and from the paper's code
(both 1e-6 N(0, 1), which starts beside the base and with gradients near zero): PEFT's convention.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray, axis_size
from haliax.util import ensure_tuple
from levanter.adaptor.lora import (
    LORA_R,
    LoraConfig,
    LowRankLinear,
    is_lora_param,
    lora_trainable_params_filter,
    loraize,
    merge_lora_modules,
)
from levanter.utils.jax_utils import leaf_key_paths
from levanter.utils.types import FilterTree

from qkvflow.errors import UserError

M = TypeVar("M", bound=eqx.Module)

RandomKey = Axis("random_key", 2)


def add_lora(
    model: M,
    r: int,
    alpha: float,
    dropout: float,
    target_modules: list[str] | str | None,
    *,
    a_init: str = "normal",
    key: jax.Array,
) -> M:
    """The model with a low-rank term for each targeted linear map.

    Args:
        target_modules: path suffixes such as `attn.c_attn`, or a regular expression that paths begin with; None means
            all linear maps. The head is never included: it is used as a matrix.
        a_init: how A is drawn: `normal`, truncated, with a deviation of 1/sqrt(In); or `uniform` between -1/sqrt(In)
            and 1/sqrt(In) as PEFT draws it, sqrt(3) narrower.

    Raises:
        UserError: a target matches nothing; the message lists the paths.
    """
    _check_targets(model, target_modules)
    config = LoraConfig(target_modules, r=r, alpha=alpha, zero_init_b=True, a_init_mode="random")
    model = loraize(model, config, key=key)
    if a_init == "uniform":
        model = _draw_uniformly(model, jax.random.fold_in(key, 1))
    if dropout == 0.0:
        return model
    return _map_lora(lambda term: dataclasses.replace(term, dropout=LoraDropout.beside(term, dropout)), model)


class LoraDropout(eqx.Module):
    """Dropout of what enters A. `draw` gives it the key of its mask: one for each layer of a stack.

    Differs from Levanter, whose LoRA wants a key in each call of a linear map: here blocks need not pass one. As with
    all dropout inside a flow, stages of a solver that share their weights share the mask.
    """

    pdrop: float = eqx.field(static=True)
    stack: tuple[Axis, ...] = eqx.field(static=True)
    inference: bool = False
    key_data: NamedArray | None = None  # {stack, random_key}, uint32; there only inside a training step

    @staticmethod
    def beside(term: LowRankLinear, pdrop: float) -> "LoraDropout":
        """For the term of a linear map, whose weights show whether it is one of a stack."""
        own = {LORA_R, *(axis.name for axis in ensure_tuple(term.lora_A.In))}
        return LoraDropout(pdrop, tuple(axis for axis in term.lora_A.weight.axes if axis.name not in own))

    @property
    def is_active(self) -> bool:
        """Whether a key must be given in the call: never."""
        return False

    def draw(self, key: jax.Array) -> "LoraDropout":
        """The same with a fresh mask."""
        axes = (*self.stack, RandomKey)
        bits = jax.random.bits(key, tuple(axis.size for axis in axes), jnp.uint32)
        return dataclasses.replace(self, key_data=hax.named(bits, axes))

    def __call__(self, x: NamedArray, *, key=None) -> NamedArray:
        del key
        if self.inference:
            return x
        if self.key_data is None:
            raise RuntimeError("LoRA with dropout in training mode: call draw_dropout(model, key) in each step.")
        own = jax.random.wrap_key_data(self.key_data.array, impl="threefry2x32")
        kept = hax.named(jax.random.bernoulli(own, 1.0 - self.pdrop, x.array.shape), x.axes)
        return hax.where(kept, x / (1.0 - self.pdrop), 0.0)


def draw_dropout(model: M, key: jax.Array) -> M:
    """The model with a fresh mask in each `LoraDropout`; itself if there are none."""
    found = [x for x in jax.tree.leaves(model, is_leaf=_is_dropout) if _is_dropout(x)]
    if not found:
        return model
    keys = iter(jax.random.split(key, len(found)))
    return jax.tree.map(lambda x: x.draw(next(keys)) if _is_dropout(x) else x, model, is_leaf=_is_dropout)


def trainable(model: eqx.Module, *, embeddings: bool) -> FilterTree:
    """A tree like the model, true where LoRA trains: A and B, and the tables at the model's entrance if asked."""
    mask = lora_trainable_params_filter(model)
    if not embeddings:
        return mask
    return eqx.tree_at(lambda m: m.embeddings, mask, jax.tree.map(lambda _: True, mask.embeddings))


def merge(model: M) -> M:
    """The ordinary model with W + (alpha / r) B A instead of each W; the model itself if it has no LoRA."""
    if not any(is_lora_param(x) for x in jax.tree.leaves(model, is_leaf=is_lora_param)):
        return model
    return merge_lora_modules(model)


def _map_lora(change: Callable[[LowRankLinear], LowRankLinear], model: M) -> M:
    return jax.tree.map(lambda x: change(x) if is_lora_param(x) else x, model, is_leaf=is_lora_param)


def _draw_uniformly(model: M, key: jax.Array) -> M:
    count = sum(is_lora_param(x) for x in jax.tree.leaves(model, is_leaf=is_lora_param))
    keys = iter(jax.random.split(key, count))

    def draw(term: LowRankLinear) -> LowRankLinear:
        limit = axis_size(term.lora_A.In) ** -0.5
        uniform = hax.random.uniform(next(keys), term.lora_A.weight.axes, minval=-limit, maxval=limit)
        return eqx.tree_at(lambda t: t.lora_A.weight, term, uniform)

    return _map_lora(draw, model)


def _is_dropout(x: object) -> bool:
    return isinstance(x, LoraDropout)


def linear_paths(model: eqx.Module) -> list[str]:
    """The paths of all linear maps but the head, as `target_modules` sees them."""
    return [path for path in _paths(model) if not path.endswith("lm_head")]


def _paths(module: eqx.Module, prefix: str = "") -> list[str]:
    def is_special(x):
        return isinstance(x, hnn.Linear | hnn.Stacked)

    names = jax.tree.leaves(leaf_key_paths(module, is_leaf=is_special, prefix=prefix))
    nodes = jax.tree.leaves(module, is_leaf=is_special)
    found = []
    for name, node in zip(names, nodes, strict=True):
        if isinstance(node, hnn.Stacked):
            found += _paths(node.stacked, f"{name}.stacked")
        elif isinstance(node, hnn.Linear):
            found.append(name)
    return found


def _check_targets(model: eqx.Module, targets: list[str] | str | None) -> None:
    paths = linear_paths(model)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise UserError(f"target_modules: {targets!r} is not a regular expression: {error}") from None
        missing = [] if any(pattern.match(path) for path in paths) else [targets]
    elif targets is None:
        missing = [] if paths else ["(all)"]
    else:
        missing = [t for t in targets if not any(path.endswith(t) for path in paths)] if targets else ["(none given)"]
    if missing:
        raise UserError(
            f"target_modules: no linear map of the model matches {', '.join(map(repr, missing))}. Give a list of path"
            " suffixes, a regular expression that matches from the start of a path, or null for all. The paths are: "
            + ", ".join(paths)
        )
