"""The GPT-2 block as a vector field B(x; W), in three forms.

parallel (the paper):      B(x) = attn(ln1(x)) + mlp(ln2(x))
sequential (GPT-2 itself): B(x) = a + mlp(ln2(x + a)),  a = attn(ln1(x)),  so that x + B(x) is the GPT-2 layer
split:                     B(x) = a + mlp(ln2(x + h a)) in a step of length h, see `qkvflow.blocks.forms`

With `convolution` the attention reads ln1(x) after a causal convolution, see `qkvflow.blocks.convolution`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import equinox as eqx
import haliax.nn as hnn
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split
from levanter.layers.attention import AttentionBackend
from levanter.utils.activation import ActivationFunctionEnum

from qkvflow.axes import HEAD_SIZE, HEADS, MLP
from qkvflow.blocks.attention import Gpt2Attention
from qkvflow.blocks.config import BlockConfig, check_choice, check_heads
from qkvflow.blocks.convolution import Convolution, ConvolvedMemory
from qkvflow.blocks.forms import FORMS, seen_by_second_half
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.matrices import by_rows
from qkvflow.blocks.memory import KeysValues
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Positive, ProperShare, Range


class Gpt2Mlp(eqx.Module):
    """c_proj(activation(c_fc(x))): {embed} -> {mlp} -> {embed}."""

    c_fc: hnn.Linear
    c_proj: hnn.Linear
    activation: Callable = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, Mlp: Axis, activation: Callable, *, key, use_bias: bool = True) -> "Gpt2Mlp":
        k_fc, k_proj = maybe_rng_split(key, 2)
        c_fc = hnn.Linear.init(Embed, Mlp, key=k_fc, use_bias=use_bias, out_first=False)
        c_proj = hnn.Linear.init(Mlp, Embed, key=k_proj, use_bias=use_bias, out_first=False)
        return Gpt2Mlp(c_fc, c_proj, activation)

    def __call__(self, x: NamedArray, inputs: Inputs) -> NamedArray:
        hidden = inputs.see("mlp.pre", by_rows(self.c_fc, x))
        hidden = inputs.made("mlp.post", self.activation, hidden)
        return inputs.see("mlp.out", by_rows(self.c_proj, hidden))


class Gpt2Block(eqx.Module):
    """B(x; W): {..., position, embed} -> {..., position, embed}. Adds nothing to x: the solver does."""

    attn_ln: hnn.LayerNorm
    attn: Gpt2Attention
    mlp_ln: hnn.LayerNorm
    mlp: Gpt2Mlp
    resid_dropout: hnn.Dropout
    form: str = eqx.field(static=True)
    convolution: Convolution | None = None

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        return self.extend(x, inputs, None, key=key)[0]

    def extend(self, x: NamedArray, inputs: Inputs, memory: KeysValues | ConvolvedMemory | None, *, key=None):
        """B(x), and the memory extended by the positions of x."""
        k_attn, k_attn_out, k_mlp_out = maybe_rng_split(key, 3)
        attn, memory = self._attended(inputs.see("attn.norm", self.attn_ln(x)), inputs, memory, key=k_attn)
        attn = self.resid_dropout(attn, key=k_attn_out)
        x = seen_by_second_half(self.form, x, attn, inputs)
        mlp = self.mlp(inputs.see("mlp.norm", self.mlp_ln(x)), inputs)
        return attn + self.resid_dropout(mlp, key=k_mlp_out), memory

    def memory(self, Batch: Axis, length: int, dtype) -> KeysValues | ConvolvedMemory:
        """An empty memory for `length` positions."""
        keys = self.attn.memory(Batch, length, dtype)
        if self.convolution is None:
            return keys
        return ConvolvedMemory(keys, self.convolution.nothing_before(Batch, dtype))

    def _attended(self, x: NamedArray, inputs: Inputs, memory, *, key):
        if self.convolution is None:
            return self.attn.extend(x, inputs, memory, key=key)
        keys, before = (None, None) if memory is None else (memory.attn, memory.before)
        x, before = self.convolution.extend(x, inputs, before)
        attn, keys = self.attn.extend(inputs.see("attn.convolved", x), inputs, keys, key=key)
        return attn, None if memory is None else ConvolvedMemory(keys, before)


@dataclass(frozen=True)
class Gpt2LikeConfig(BlockConfig):
    """Shared by the blocks with GPT-2's attention: LayerNorm, fused attention, learned positions, a tied head.

    Attributes:
        num_heads: attention heads.
        form: `parallel`, where attention and MLP both read x, `sequential`, one after the other, or `split`, one after
            the other within each step, see `qkvflow.blocks.forms`.
        use_bias: bias of all linear maps and norms.
        resid_pdrop: dropout of the outputs of attention and MLP.
        attn_pdrop: dropout of the attention weights.
        layer_norm_epsilon: epsilon of all norms.
        attn_backend: the kernel of attention; if not given the best of the platform, see `qkvflow.blocks.kernels`.
        flash_attention_block_size: positions in a block of that kernel; its own if not given.
    """

    num_heads: Count = 12
    form: str = "parallel"
    use_bias: bool = True
    resid_pdrop: ProperShare = 0.0
    attn_pdrop: ProperShare = 0.0
    layer_norm_epsilon: Positive = 1e-5
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: Count | None = None

    def __post_init__(self):
        super().__post_init__()
        check_choice("form", self.form, FORMS)

    def check(self, Embed: Axis) -> None:
        check_heads(Embed.size, self.num_heads)

    def attention(self, Embed: Axis, *, key) -> Gpt2Attention:
        """A fresh attention layer."""
        return Gpt2Attention.init(
            Embed,
            Axis(HEADS, self.num_heads),
            Axis(HEAD_SIZE, Embed.size // self.num_heads),
            key=key,
            use_bias=self.use_bias,
            dropout=self.attn_pdrop,
            backend=self.attn_backend,
            flash_block_size=self.flash_attention_block_size,
        )

    def norm(self, Embed: Axis) -> hnn.LayerNorm:
        return hnn.LayerNorm.init(Embed, eps=self.layer_norm_epsilon, use_bias=self.use_bias)

    @property
    def depends_on_step(self) -> bool:
        return self.form == "split"

    @property
    def learned_positions(self) -> bool:
        return True

    @property
    def tie_word_embeddings(self) -> bool:
        return True


@BlockConfig.register_subclass("gpt2")
@dataclass(frozen=True)
class Gpt2BlockConfig(Gpt2LikeConfig):
    """LayerNorm, fused attention, and an MLP of `mlp_scale` times the width; with learned positions and a tied head.

    Attributes:
        mlp_scale: hidden units of the MLP, as a multiple of the width.
        convolution: positions that a causal convolution before the attention sees, see `qkvflow.blocks.convolution`;
            null for none.
        activation: of the hidden units.
    """

    mlp_scale: Count = 4
    convolution: Annotated[int, Range(at_least=2)] | None = None
    activation: ActivationFunctionEnum = ActivationFunctionEnum.gelu_new

    def __post_init__(self):
        super().__post_init__()
        if self.activation is ActivationFunctionEnum.xielu:
            raise UserError(
                "activation: xielu has its own parameters, which this block does not support. Choose another"
                " activation."
            )

    def init(self, Embed: Axis, *, key) -> Gpt2Block:
        k_attn, k_mlp = maybe_rng_split(key, 2)
        Mlp = Axis(MLP, self.mlp_scale * Embed.size)
        attn = self.attention(Embed, key=k_attn)
        mlp = Gpt2Mlp.init(Embed, Mlp, self.activation.to_fn(), key=k_mlp, use_bias=self.use_bias)
        convolution = None if self.convolution is None else Convolution.init(Embed, self.convolution)
        norms, dropout = (self.norm(Embed), self.norm(Embed)), hnn.Dropout(self.resid_pdrop)
        return Gpt2Block(norms[0], attn, norms[1], mlp, dropout, self.form, convolution)

    def flops_per_token(self, hidden_dim: int, context_length: int) -> float:
        """Forward FLOPs of one evaluation of B: projections 2*12 d^2 (mlp_scale 4), attention 2*2*n*d, and 2 d for each
        place of a convolution."""
        convolution = 2 * (self.convolution or 0) * hidden_dim
        return self.flops_of_products(hidden_dim) + 4 * context_length * hidden_dim + convolution

    def flops_of_products(self, hidden_dim: int) -> float:
        return 2 * hidden_dim**2 * (4 + 2 * self.mlp_scale)
