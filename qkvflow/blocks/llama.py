"""The Llama block as a vector field B(x; W): RMSNorm, rotary grouped-query attention, gated MLP; in four forms.

parallel:               B(x) = attn(n1(x)) + mlp(n2(x))
sequential (Llama):     B(x) = a + mlp(n2(x + a)),  a = attn(n1(x)),  so that x + B(x) is the Llama layer
split:                  B(x) = a + mlp(n2(x + h a)) in a step of length h, see `qkvflow.blocks.forms`
official (the paper's): B(x) = attn(n1(x)) + mlp(n2(n1(x)))

Source of `official`: `LlamaDecoderLayer` in the official nn/dynamic_llama.py, which overwrites x by its first norm.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import equinox as eqx
import haliax.nn as hnn
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, RotaryEmbeddingsConfig
from levanter.utils.activation import ActivationFunctionEnum

from qkvflow.axes import HEAD_SIZE, HEADS, KV_HEAD, MLP
from qkvflow.blocks.config import BlockConfig, check_choice, check_heads, divisors
from qkvflow.blocks.forms import FORMS, seen_by_second_half
from qkvflow.blocks.grouped_query import GroupedQueryAttention
from qkvflow.blocks.inputs import Inputs
from qkvflow.blocks.matrices import by_rows
from qkvflow.blocks.memory import KeysValues
from qkvflow.blocks.probe import apart
from qkvflow.errors import UserError
from qkvflow.inside.rotary import check_rope
from qkvflow.ranges import Count, Positive, ProperShare

LLAMA_FORMS = (*FORMS, "official")
EPSILON, OFFICIAL_BLOCK_EPSILON = 1e-5, 1e-6


class GatedMlp(eqx.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)): {embed} -> {mlp} -> {embed}. SwiGLU with SiLU."""

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear
    activation: Callable = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, Mlp: Axis, activation: Callable, *, key, use_bias: bool = False) -> "GatedMlp":
        k_gate, k_up, k_down = maybe_rng_split(key, 3)
        gate = hnn.Linear.init(Embed, Mlp, key=k_gate, use_bias=use_bias, out_first=False)
        up = hnn.Linear.init(Embed, Mlp, key=k_up, use_bias=use_bias, out_first=False)
        down = hnn.Linear.init(Mlp, Embed, key=k_down, use_bias=use_bias, out_first=False)
        return GatedMlp(gate, up, down, activation)

    def __call__(self, x: NamedArray, inputs: Inputs) -> NamedArray:
        gate = inputs.see("mlp.gate", by_rows(self.gate_proj, x))
        active, up = self.activation(gate), inputs.see("mlp.up", by_rows(self.up_proj, x))
        hidden = inputs.beside("mlp.post", lambda: self._gated(*apart(gate, up)), lambda post: post, active * up)
        return inputs.see("mlp.out", by_rows(self.down_proj, hidden))

    def _gated(self, gate: NamedArray, up: NamedArray) -> NamedArray:
        return self.activation(gate) * up


class LlamaBlock(eqx.Module):
    """B(x; W): {..., position, embed} -> {..., position, embed}. Adds nothing to x: the solver does."""

    input_layernorm: hnn.RmsNorm
    self_attn: GroupedQueryAttention
    post_attention_layernorm: hnn.RmsNorm
    mlp: GatedMlp
    resid_dropout: hnn.Dropout
    form: str = eqx.field(static=True)

    def __call__(self, x: NamedArray, inputs: Inputs, *, key=None) -> NamedArray:
        return self.extend(x, inputs, None, key=key)[0]

    def extend(self, x: NamedArray, inputs: Inputs, memory: KeysValues | None, *, key=None):
        """B(x), and the memory extended by the positions of x."""
        k_attn, k_attn_out, k_mlp_out = maybe_rng_split(key, 3)
        n1 = inputs.see("attn.norm", self.input_layernorm(x))
        attn, memory = self.self_attn.extend(n1, inputs, memory, key=k_attn)
        attn = self.resid_dropout(attn, key=k_attn_out)
        x = n1 if self.form == "official" else seen_by_second_half(self.form, x, attn, inputs)
        mlp = self.mlp(inputs.see("mlp.norm", self.post_attention_layernorm(x)), inputs)
        return attn + self.resid_dropout(mlp, key=k_mlp_out), memory

    def memory(self, Batch: Axis, length: int, dtype) -> KeysValues:
        """An empty memory for `length` positions."""
        return self.self_attn.memory(Batch, length, dtype)


@BlockConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaBlockConfig(BlockConfig):
    """Rotary positions inside the attention; an untied head by default, and no position embeddings.

    Attributes:
        num_heads: attention heads.
        form: `parallel`, `sequential`, `split` or `official`, see `qkvflow.blocks.llama`.
        resid_pdrop: dropout of the outputs of attention and MLP.
        attn_pdrop: dropout of the attention weights.
        num_kv_heads: heads of keys and values, a divisor of num_heads; defaults to num_heads.
        intermediate_dim: hidden units of the MLP; defaults to 4 times the width, as in the paper's Llama.
        tie_word_embeddings: whether the head is the embedding matrix.
        activation: of the gate of the MLP.
        rope: Levanter's rotary embeddings, `{type: default | llama3 | yarn, theta: ...}`, halves rotated (not pairs).
        layer_norm_epsilon: epsilon of all norms; defaults to 1e-5, but 1e-6 for those inside an `official` block.
        use_bias: bias of all linear maps and norms. The norms inside an `official` block always have a bias, as in its
            source.
        attn_backend: the kernel of attention; if not given the best of the platform, see `qkvflow.blocks.kernels`.
        flash_attention_block_size: positions in a block of that kernel; its own if not given.
    """

    num_heads: Count = 16
    num_kv_heads: Count | None = None
    intermediate_dim: Count | None = None
    form: str = "parallel"
    rope: RotaryEmbeddingsConfig = field(default_factory=DefaultRotaryEmbeddingsConfig)
    tie_word_embeddings: bool = False
    activation: ActivationFunctionEnum = ActivationFunctionEnum.silu
    use_bias: bool = False
    resid_pdrop: ProperShare = 0.0
    attn_pdrop: ProperShare = 0.0
    layer_norm_epsilon: Positive | None = None
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: Count | None = None

    def __post_init__(self):
        super().__post_init__()
        check_choice("form", self.form, LLAMA_FORMS)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads != 0:
            possible = ", ".join(map(str, divisors(self.num_heads)))
            raise UserError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads}), because each head of"
                f" keys and values serves an equal group of query heads. Possible: {possible}."
            )
        check_rope(self.rope)
        if self.activation is ActivationFunctionEnum.xielu:
            raise UserError(
                "activation: xielu has its own parameters, which this block does not support. Choose another"
                " activation."
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def mlp_dim(self, hidden_dim: int) -> int:
        """Hidden units of the MLP."""
        return 4 * hidden_dim if self.intermediate_dim is None else self.intermediate_dim

    def check(self, Embed: Axis) -> None:
        check_heads(Embed.size, self.num_heads)
        if (Embed.size // self.num_heads) % 2 != 0:
            raise UserError(
                f"The head size is hidden_dim / num_heads = {Embed.size} / {self.num_heads} ="
                f" {Embed.size // self.num_heads}, but rotary positions rotate pairs of numbers, so it must be even."
                " Choose another hidden_dim or num_heads."
            )

    def init(self, Embed: Axis, *, key) -> LlamaBlock:
        k_attn, k_mlp = maybe_rng_split(key, 2)
        attn = GroupedQueryAttention.init(
            Embed,
            Axis(HEADS, self.num_heads),
            Axis(KV_HEAD, self.kv_heads),
            Axis(HEAD_SIZE, Embed.size // self.num_heads),
            self.rope,
            key=k_attn,
            use_bias=self.use_bias,
            dropout=self.attn_pdrop,
            backend=self.attn_backend,
            flash_block_size=self.flash_attention_block_size,
        )
        Mlp = Axis(MLP, self.mlp_dim(Embed.size))
        mlp = GatedMlp.init(Embed, Mlp, self.activation.to_fn(), key=k_mlp, use_bias=self.use_bias)
        norms = (self.block_norm(Embed), self.block_norm(Embed))
        return LlamaBlock(norms[0], attn, norms[1], mlp, hnn.Dropout(self.resid_pdrop), self.form)

    def norm(self, Embed: Axis) -> hnn.RmsNorm:
        eps = EPSILON if self.layer_norm_epsilon is None else self.layer_norm_epsilon
        return hnn.RmsNorm.init(Embed, eps=eps, use_bias=self.use_bias)

    def block_norm(self, Embed: Axis) -> hnn.RmsNorm:
        """A fresh norm for inside the block."""
        if self.form != "official":
            return self.norm(Embed)
        eps = OFFICIAL_BLOCK_EPSILON if self.layer_norm_epsilon is None else self.layer_norm_epsilon
        return hnn.RmsNorm.init(Embed, eps=eps, use_bias=True)

    @property
    def depends_on_step(self) -> bool:
        return self.form == "split"

    @property
    def learned_positions(self) -> bool:
        return False

    def kv_cache_width(self, hidden_dim: int) -> int:
        return 2 * self.kv_heads * (hidden_dim // self.num_heads)

    def flops_per_token(self, hidden_dim: int, context_length: int) -> float:
        """Forward FLOPs of one evaluation of B: q and o 4 d^2, k and v 4 d d_kv, MLP 6 d m, attention 4 n d."""
        kv_dim = self.kv_heads * (hidden_dim // self.num_heads)
        projections = 4 * hidden_dim**2 + 4 * hidden_dim * kv_dim
        return projections + 6 * hidden_dim * self.mlp_dim(hidden_dim) + 4 * context_length * hidden_dim
