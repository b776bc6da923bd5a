"""The state-space block as a vector field B(x; W): GPT-2's attention, and a state-space mixer instead of the MLP.

parallel:   B(x) = attn(ln1(x)) + ssm(ln2(x))
sequential: B(x) = a + ssm(ln2(x + a)),  a = attn(ln1(x))
split:      B(x) = a + ssm(ln2(x + h a)) in a step of length h, see `qkvflow.blocks.forms`
"""

from dataclasses import dataclass

import equinox as eqx
import haliax.nn as hnn
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split

from qkvflow.axes import STATE
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.config import BlockConfig
from qkvflow.blocks.forms import seen_by_second_half
from qkvflow.blocks.gpt2 import Gpt2LikeConfig
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.memory import KeysValues
from qkvflow.blocks.state_space import SsmMixer, delta_rank
from qkvflow.ranges import Count


class SsmBlock(eqx.Module):
    """B(x; W): {..., position, embed} -> {..., position, embed}. Adds nothing to x: the solver does."""

    attn_ln: hnn.LayerNorm
    attn: Gpt2Attention
    ssm_ln: hnn.LayerNorm
    ssm: SsmMixer
    resid_dropout: hnn.Dropout
    form: str = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        return self.extend(x, inputs, None, key=key)[0]

    def extend(self, x: NamedArray, inputs: Inputs, memory: "SsmMemory | None", *, key=None):
        """B(x), and the memory extended by the positions of x."""
        k_attn, k_attn_out, k_ssm_out = maybe_rng_split(key, 3)
        keys, state = (None, None) if memory is None else (memory.attn, memory.ssm)
        attn, keys = self.attn.extend(inputs.see("attn.norm", self.attn_ln(x)), inputs, keys, key=k_attn)
        attn = self.resid_dropout(attn, key=k_attn_out)
        x = seen_by_second_half(self.form, x, attn, inputs)
        mixed, state = self.ssm.extend(inputs.see("ssm.norm", self.ssm_ln(x)), inputs, state)
        mixed = inputs.see("ssm.out", mixed)
        return attn + self.resid_dropout(mixed, key=k_ssm_out), None if memory is None else SsmMemory(keys, state)

    def memory(self, Batch: Axis, length: int, dtype) -> "SsmMemory":
        """An empty memory for `length` positions."""
        return SsmMemory(self.attn.memory(Batch, length, dtype), self.ssm.initial_state(Batch))


class SsmMemory(eqx.Module):
    """Keys and values of the attention, and the state of the mixer, {batch, state, embed}."""

    attn: KeysValues
    ssm: NamedArray


@BlockConfig.register_subclass("ssm")
@dataclass(frozen=True)
class SsmBlockConfig(Gpt2LikeConfig):
    """GPT-2's attention and a diagonal state-space model with `state_size` numbers for each channel of the state x.

    Attributes:
        state_size: numbers per channel; Mamba uses 16.
        selective: Delta, B and C depend on the input (Mamba); otherwise only on layer-time, through the weights.
    """

    state_size: Count = 16
    selective: bool = False

    def init(self, Embed: Axis, *, key) -> SsmBlock:
        k_attn, k_ssm = maybe_rng_split(key, 2)
        attn = self.attention(Embed, key=k_attn)
        ssm = SsmMixer.init(Embed, Axis(STATE, self.state_size), selective=self.selective, key=k_ssm)
        return SsmBlock(self.norm(Embed), attn, self.norm(Embed), ssm, hnn.Dropout(self.resid_pdrop), self.form)

    def flops_per_token(self, hidden_dim: int, context_length: int) -> float:
        """Forward FLOPs of one evaluation of B for width d, state N: attention 8 d^2 + 4 n d, and the mixer.

        Not selective: 6 N for each channel. Selective: projections 4 d (r + N), r = d/16, and 30 N for each channel,
        as XLA counts it: 9 N of the recurrence itself, and the rest of the exact hold (its series).
        """
        d, N = hidden_dim, self.state_size
        return self.flops_of_products(d) + 4 * context_length * d + (30 if self.selective else 6) * N * d

    def flops_of_products(self, hidden_dim: int) -> float:
        d = hidden_dim
        return 8 * d**2 + (4 * d * (delta_rank(d) + self.state_size) if self.selective else 0)
