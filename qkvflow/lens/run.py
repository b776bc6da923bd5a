"""A forward pass with recording and edits. It is the model's own: the same blocks, scan and solver."""

from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.axes import POSITION
from qkvflow.depth import FixedPlan
from qkvflow.errors import UserError
from qkvflow.lens.cache import Cache
from qkvflow.lens.names import chosen
from qkvflow.lens.probe import Edit, Edits, Notes, Probe
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.levanter_twin import enter

_known: dict[Any, tuple[str, ...]] = {}  # names for each model structure


def run_with_cache(
    model: LmHeadModel,
    tokens: NamedArray,
    names: str | Iterable[str] | None = "*",
    *,
    edits: Mapping[str, Edit] | None = None,
    attn_mask=None,
    **inputs: Any,
) -> tuple[NamedArray, Cache]:
    """Logits, and the recorded values.

    Args:
        model: any that `qkvflow.models.levanter_twin.enter` accepts; used in evaluation mode, without dropout.
        tokens: {..., position}.
        names: of places, as listed by `lens.names(model)`, or globs; `*` also matches dots. None means all, as `*`.
        edits: as in `run_with_edits`. The cache holds the edited values.
        attn_mask, inputs: as in a call of the model: `control`, `pos_ids`.

    Returns:
        Without edits, the logits are bit for bit those of `model(tokens)`.

    Raises:
        UserError: a name that the model does not have, an edit that is no function or changes the shape, or a model
            without fixed steps.
    """
    model = opened(model)
    asked = None if names is None or names == "*" else chosen(names, _names(model))
    notes = Notes(asked, by_name(model, edits))
    logits = model(tokens, attn_mask, probe=Probe(notes), **inputs)
    return logits, notes.cache()


def run_with_edits(
    model: LmHeadModel, tokens: NamedArray, edits: Mapping[str, Edit], *, attn_mask=None, **inputs: Any
) -> NamedArray:
    """Logits of a pass with values replaced at places: {name or glob: value -> value with the same axes}.

    Several edits of one place are applied in the alphabetical order of their keys, in which JAX keeps a dict.
    Everything that does not come after an edit, in the pass and in the sequence, is unchanged. Arguments and errors as
    in `run_with_cache`.
    """
    if not edits:
        return opened(model)(tokens, attn_mask, **inputs)
    return run_with_cache(model, tokens, (), edits=edits, attn_mask=attn_mask, **inputs)[0]


def names(model: LmHeadModel, pattern: str = "*") -> tuple[str, ...]:
    """The names of the model's places that match a glob, in the order of the forward pass."""
    known = _names(opened(model))
    found = chosen(pattern, known)
    return tuple(name for name in known if name in found)


def opened(model: LmHeadModel) -> NeuralOdeLMHeadModel:
    """The model in qkvflow's form, in evaluation mode.

    Raises:
        UserError: an unsupported model, or one with adaptive steps.
    """
    ours = inference_mode(model if isinstance(model, NeuralOdeLMHeadModel) else enter(model), True)
    if not isinstance(ours.transformer.flow.plan, FixedPlan):
        raise UserError(
            "diffrax solves this flow (rtol and atol, or adjoint: backsolve), so it has no numbered steps to inspect."
            " Use a fixed grid: model.with_depth(model.config.depth.on_grid(steps))."
        )
    return ours


def _names(model: NeuralOdeLMHeadModel) -> tuple[str, ...]:
    structure = jax.tree.structure(eqx.filter(model, eqx.is_array))
    if structure not in _known:
        notes = Notes(None, ())
        tokens = hax.zeros(Axis(POSITION, 1), dtype=jnp.int32)
        eqx.filter_eval_shape(lambda m: m(tokens, probe=Probe(notes)), model)
        _known[structure] = tuple(notes.cache())
    return _known[structure]


def by_name(model: NeuralOdeLMHeadModel, edits: Mapping[str, Edit] | None) -> Edits:
    """Edits with the names that their patterns match.

    Raises:
        UserError: a name that the model does not have, or an edit that is no function.
    """
    if not edits:
        return []
    for pattern, edit in edits.items():
        if not callable(edit):
            raise UserError(
                f"the edit of {pattern} must be a function of the value there, such as lambda x: x * 0, got"
                f" {edit!r:.80}."
            )
    known = _names(model)
    return [(chosen(pattern, known), edits[pattern]) for pattern in sorted(edits)]
