"""What a block is given besides the state x: one record, which passes through model, flow and solver as it is.

To add an input (a second signal, segment ids), add a field here and read it in the block that uses it: models take a
keyword of that name, batches an attribute, and everything between hands the record on.
"""

import dataclasses

import equinox as eqx
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from qkvflow.blocks.memory import Window


class Inputs(eqx.Module):
    """Beside the state x {..., position, embed} of B(x; W).

    Attributes:
        mask: of the attention; None attends to everything. Not read where there is a `window`.
        pos_ids: {..., position} int, of rotary positions or of the table of positions; None is 0, 1, 2, ...
        control: {..., control} or {..., position, control}; None is zero control.
        window: which positions x holds, where earlier ones are remembered; None if x holds whole sequences.
    """

    mask: AttentionMask | NamedArray | None = None
    pos_ids: NamedArray | None = None
    control: NamedArray | None = None
    window: Window | None = None

    @staticmethod
    def of(attn_mask: AttentionMask | NamedArray | None = None, **inputs: NamedArray | None) -> "Inputs":
        """For whole sequences: causal if no mask is given, and the fields named in `inputs`."""
        return Inputs(AttentionMask.causal() if attn_mask is None else attn_mask, **inputs)

    @staticmethod
    def of_example(example) -> "Inputs":
        """From a training example: its `attn_mask`, and every field of this record that it has."""
        own = [field.name for field in dataclasses.fields(Inputs) if hasattr(example, field.name)]
        return Inputs.of(example.attn_mask, **{name: getattr(example, name) for name in own})
