"""The language model without a cache: recomputes the whole text for each token. The reference for caching.

Used if there is no cache: for `use_cache=False`, and for Levanter models that qkvflow cannot cache.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from qkvflow.axes import BATCH, CONTROL, EMBED, POSITION
from qkvflow.blocks import Inputs, Window
from qkvflow.models import NeuralOdeLMHeadModel


class RecomputedModel(eqx.Module):
    """The interface of `CachedModel`; its memory of a sequence is the tokens and the control."""

    model: LmHeadModel

    def memory(self, Batch: Axis, length: int) -> tuple[NamedArray, NamedArray | None]:
        """An empty memory with room for `length` tokens."""
        Pos = Axis(POSITION, length)
        control = getattr(self.model.config, "control", None)
        controls = None if control is None else hax.zeros((Batch, Pos, Axis(CONTROL, control.dim)))
        return hax.zeros((Batch, Pos), dtype=jnp.int32), controls

    def extend(self, tokens: NamedArray, inputs: Inputs, memory):
        """The final activations at the new positions, {batch, position, embed}, and the memory including them."""
        (text, controls), window = memory, inputs.window
        text = _write(text, tokens, window)
        whole = {}
        if inputs.control is not None:
            controls = _write(controls, inputs.control, window)
            whole["control"] = controls
        if isinstance(self.model, NeuralOdeLMHeadModel) and text.axis_size(POSITION) > self.model.config.max_seq_len:
            # Room that is only padding: its positions may be any.
            places = hax.arange(text.resolve_axis(POSITION), dtype=jnp.int32)
            whole["pos_ids"] = hax.minimum(places, self.model.config.max_seq_len - 1)
        x = self.model.activations(text, AttentionMask.causal(), **whole)
        x = x[0] if isinstance(x, tuple) else x  # some Levanter models add a loss
        New = tokens.resolve_axis(POSITION)

        def read(x, start):
            return jax.lax.dynamic_slice_in_dim(x, start, New.size, axis=0)

        Batch, Embed = tokens.resolve_axis(BATCH), x.resolve_axis(EMBED)
        new = jax.vmap(read)(x.rearrange((BATCH, POSITION, EMBED)).array, window.start.array)
        return hax.named(new, (Batch, New, Embed)), (text, controls)

    def logits(self, x: NamedArray) -> NamedArray:
        """{..., vocab}, fp32, from the activations that `extend` returns."""
        return hax.dot(x, self.model.get_lm_head(), axis=EMBED, preferred_element_type=jnp.float32)


def _write(memory: NamedArray, new: NamedArray, window: Window) -> NamedArray:
    new = new.rearrange([a.name for a in memory.axes])

    def write(memory, new, start):
        return jax.lax.dynamic_update_slice_in_dim(memory, new, start, axis=0)

    return hax.named(jax.vmap(write)(memory.array, new.array, window.start.array), memory.axes)
