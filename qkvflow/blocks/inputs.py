"""The inputs of a block besides the state x: one record, which passes through model, flow and solver.

To add an input (a second signal, segment ids), add a field here and read it in the block that uses it: models take a
keyword of that name, batches an attribute, and everything in between passes the record on.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from qkvflow.blocks.memory import Window
from qkvflow.blocks.probe import Probe, apart


class Inputs(eqx.Module):
    """The inputs of B(x; W) besides the state x {..., position, embed}.

    Attributes:
        mask: attention mask; None attends to everything. Ignored if there is a `window`.
        pos_ids: {..., position} int, for rotary or learned positions; None means 0, 1, 2, ...
        control: {..., control} or {..., position, control}; None means zero control.
        window: which positions x contains, if earlier ones are in a memory; None if x contains whole sequences.
        step: length of the step in which the field is evaluated, if it is the only evaluation in it; 0 for the ODE
            itself. The flow sets it; only blocks of form `split` read it.
        probe: receives every named value of the forward pass while it is traced; None, the value outside
            `qkvflow.lens`, leaves no trace in the program.
    """

    mask: AttentionMask | NamedArray | None = None
    pos_ids: NamedArray | None = None
    control: NamedArray | None = None
    window: Window | None = None
    step: float = eqx.field(static=True, default=0.0)
    probe: Probe | None = None

    @staticmethod
    def of(attn_mask: AttentionMask | NamedArray | None = None, **inputs: Any) -> "Inputs":
        """For whole sequences: causal if no mask is given, and the fields named in `inputs`."""
        return Inputs(AttentionMask.causal() if attn_mask is None else attn_mask, **inputs)

    @staticmethod
    def of_example(example) -> "Inputs":
        """From a training example: its `attn_mask`, and every field of this record that it has."""
        own = [field.name for field in dataclasses.fields(Inputs) if hasattr(example, field.name)]
        return Inputs.of(example.attn_mask, **{name: getattr(example, name) for name in own})

    def see(self, place: str, value: NamedArray) -> NamedArray:
        """Names a value of the forward pass. Returns the value that the pass continues with: `value`, unless it is
        edited."""
        return value if self.probe is None else self.probe.see(place, value)

    def made(self, place: str, make: Callable[..., NamedArray], *of: NamedArray) -> NamedArray:
        """The same for `make(*of)` of elementary functions, computed once more where it is looked at (see `apart`)."""
        return self.beside(place, lambda: make(*apart(*of)), lambda value: value, make(*of))

    def beside(
        self,
        place: str,
        make: Callable[[], NamedArray],
        use: Callable[[NamedArray], NamedArray],
        plain: NamedArray,
    ) -> NamedArray:
        """The same for a value that the pass itself does not have: `plain`, unless it is edited; then `use` of it."""
        return plain if self.probe is None else self.probe.beside(place, make, use, plain)

    def within(self, part: str) -> "Inputs":
        """For a part of the model, whose places have names that begin with its own."""
        return self if self.probe is None else self.probed_by(self.probe.within(part))

    def in_step(self, length: float) -> "Inputs":
        """The same, in steps of this length."""
        return dataclasses.replace(self, step=length)

    def probed_by(self, probe: Probe) -> "Inputs":
        """The same, with another probe."""
        return dataclasses.replace(self, probe=probe)
