"""A continuous-depth language model as ordinary layers, for transformers; it needs nothing but plain torch.

    x(0) = embed(tokens);   dx/dt = B(x; W(t)), t in [0, 1];   logits = head(norm(x(1)))

The flow is computed by an explicit Runge-Kutta method on a fixed grid: `flow.blocks` are B at the distinct times of its
stages, `config.flow` says which stage of which step uses which block. Ordinary layers x + B(x) may precede and follow
the flow. In a model with control, `control` shifts the input of every block of the flow.
qkvflow wrote this file with its folder; weights are [in, out].
"""

# pyright: reportMissingImports=false

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

_SIZES = {"vocab_size": 257, "hidden_size": 16, "max_position_embeddings": 16, "control": None}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
_LAYERS = {"num_hidden_layers": 1, "prelude_layers": 0, "coda_layers": 0}  # the first counts evaluations of B: caches
_BLOCK = {"kind": "gpt2", "form": "parallel", "ordinary_form": "sequential", "bias": True, "norm_bias": True}
_BLOCK |= {"activation": "gelu_new", "inner": 64, "eps": 1e-5, "norm_eps": 1e-5}
_FLOW = {"blocks": 1, "a": [[]], "b": [1.0], "rows": [[0]], "back": None, "step": 1.0, "coupling": None}


class QkvflowConfig(PretrainedConfig):
    """
    block: `kind` (gpt2, llama or ssm), its `form` (parallel, sequential, split, official) and sizes; `ordinary_form`
        is the form of the layers around the flow, `field_step` the h of the split form.
    flow: `blocks`, their number; `a` and `b` of the tableau; `rows`, for each step the block of each stage; `back`, the
        same for the second half of a reversible step, whose `coupling` is a number; `step`, the length of a step.
    control: number of components of the control signal; None for a model without control.
    """

    model_type = "qkvflow"

    def __init__(self, **given):
        for name, default in {**_SIZES, **_LAYERS, "block": _BLOCK, "flow": _FLOW}.items():
            setattr(self, name, given.pop(name, default))
        super().__init__(**given)


class FlowCache(DynamicCache):
    """Keys and values, and the states of state-space mixers."""

    def __init__(self):
        super().__init__()
        self.states = {}

    def crop(self, max_length):
        if self.states:
            raise ValueError("the state of a state-space model cannot be rolled back")
        super().crop(max_length)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.states = {i: state.index_select(0, beam_idx.to(state.device)) for i, state in self.states.items()}


class Pass:
    """Inputs of all blocks in one forward pass, and the index of the current evaluation of B."""

    def __init__(self, mask, real, rotation, control, cache):
        self.mask, self.real, self.rotation, self.control, self.cache = mask, real, rotation, control, cache
        self.evaluation = 0


class Linear(nn.Module):
    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.T, self.bias)


class RmsNorm(nn.Module):
    def __init__(self, size, eps, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        x = self.weight * wide.to(x.dtype)
        return x if self.bias is None else x + self.bias


def norm(config, eps, bias):
    if config.block["kind"] == "llama":
        return RmsNorm(config.hidden_size, eps, bias)
    return nn.LayerNorm(config.hidden_size, eps=eps, bias=bias)


def rotate(x, rotation):
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)


def attend(q, k, v, now):
    """softmax(q k^T / sqrt(head_size)) v of [batch, heads, position, head_size]; -> [batch, position, width]."""
    if now.cache is not None:
        k, v = now.cache.update(k, v, now.evaluation)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + now.mask
    out = scores.softmax(-1).to(v.dtype) @ v
    return out.transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config.hidden_size, config.block["bias"]
        self.heads = config.num_attention_heads
        self.c_attn, self.c_proj = Linear(width, 3 * width, bias), Linear(width, width, bias)

    def forward(self, x, now):
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(attend(*heads, now))


class GroupedAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config.hidden_size, config.block["bias"]
        self.size = width // config.num_attention_heads
        narrow = self.size * config.num_key_value_heads
        self.q_proj, self.o_proj = Linear(width, width, bias), Linear(width, width, bias)
        self.k_proj, self.v_proj = Linear(width, narrow, bias), Linear(width, narrow, bias)

    def forward(self, x, now):
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotate(q, now.rotation), rotate(k, now.rotation), v, now))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner, bias = config.hidden_size, config.block["inner"], config.block["bias"]
        self.c_fc, self.c_proj = Linear(width, inner, bias), Linear(inner, width, bias)
        self.activation = ACT2FN[config.block["activation"]]

    def forward(self, x, now):
        return self.c_proj(self.activation(self.c_fc(x)))


class GatedMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner, bias = config.hidden_size, config.block["inner"], config.block["bias"]
        self.gate_proj, self.up_proj = Linear(width, inner, bias), Linear(width, inner, bias)
        self.down_proj = Linear(inner, width, bias)
        self.activation = ACT2FN[config.block["activation"]]

    def forward(self, x, now):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class StateSpace(nn.Module):
    def __init__(self, width, size, selective):
        super().__init__()
        self.A_raw, self.delta_raw = nn.Parameter(torch.ones(size, width)), nn.Parameter(torch.ones(width))
        self.D = nn.Parameter(torch.ones(width))
        self.B = None if selective else nn.Parameter(torch.ones(size, width))
        self.C = None if selective else nn.Parameter(torch.ones(size, width))


class Ssm(nn.Module):
    """h_k = exp(Delta A) h_{k-1} + (exp(Delta A) - 1)/A B x_k,  y = C h + D x, in fp32, position by position."""

    def __init__(self, config):
        super().__init__()
        width, size, rank = config.hidden_size, config.block["state_size"], config.block["delta_rank"]
        self.space = StateSpace(width, size, rank is not None)
        sizes = {"delta_down": (width, rank), "delta_up": (rank, width), "B": (width, size), "C": (width, size)}
        sizes = {} if rank is None else sizes
        self.selection = nn.ModuleDict({name: Linear(*shape, False) for name, shape in sizes.items()})

    def forward(self, x, now):
        space, wide, chosen = self.space, x.float(), self.selection
        A, delta = -F.softplus(space.A_raw.float()), space.delta_raw.float()
        if not chosen:
            delta = F.softplus(delta).expand_as(wide)
            B, C = space.B.float(), space.C.float()
        else:
            delta = F.softplus(chosen["delta_up"](chosen["delta_down"](x)).float() + delta)
            B, C = chosen["B"](x).float()[..., None], chosen["C"](x).float()[..., None]
        z = delta[:, :, None] * A
        take = delta[:, :, None] * torch.where(z == 0, torch.ones_like(z), torch.expm1(z) / z) * B * wide[:, :, None]
        keep, states = z.exp(), None if now.cache is None else now.cache.states
        state = torch.zeros_like(take[:, 0]) if not states else states.get(now.evaluation, torch.zeros_like(take[:, 0]))
        outputs = []
        for k in range(x.shape[1]):
            after = keep[:, k] * state + take[:, k]
            state = torch.where(now.real[:, k, None, None], after, state)
            outputs.append(((C[:, k] if chosen else C) * state).sum(1))
        if states is not None:
            states[now.evaluation] = state
        return (torch.stack(outputs, 1) + wide * space.D.float()).to(x.dtype)


class Block(nn.Module):
    """B(x; W), without adding x: the step in depth does that. The second half sees x + ahead * attention."""

    NAMES = {  # noqa: RUF012
        "gpt2": ("attn_ln", "attn", FusedAttention, "mlp_ln", "mlp", Mlp),
        "ssm": ("attn_ln", "attn", FusedAttention, "ssm_ln", "ssm", Ssm),
        "llama": ("input_layernorm", "self_attn", GroupedAttention, "post_attention_layernorm", "mlp", GatedMlp),
    }

    def __init__(self, config, form):
        super().__init__()
        self.form, self.names = form, self.NAMES[config.block["kind"]]
        self.ahead = {"sequential": 1.0, "split": config.block.get("field_step", 0.0)}.get(form, 0.0)
        norm1, attention, attention_class, norm2, mixer, mixer_class = self.names
        is_flow = form == config.block["form"]
        eps = config.block["eps" if is_flow else "norm_eps"]
        bias = config.block["norm_bias"] if is_flow else config.block["bias"]
        self.add_module(norm1, norm(config, eps, bias))
        self.add_module(attention, attention_class(config))
        self.add_module(norm2, norm(config, eps, bias))
        self.add_module(mixer, mixer_class(config))

    def forward(self, x, now):
        norm1, attention, _, norm2, mixer, _ = self.names
        first = getattr(self, norm1)(x)
        attn = getattr(self, attention)(first, now)
        seen = first if self.form == "official" else x + self.ahead * attn if self.ahead else x
        mixed = getattr(self, mixer)(getattr(self, norm2)(seen), now)
        now.evaluation += 1
        return attn + mixed


class Controlled(nn.Module):
    """alpha B(x + s + C u)."""

    def __init__(self, config, form):
        super().__init__()
        self.block = Block(config, form)
        self.shift, self.alpha = nn.Parameter(torch.zeros(config.hidden_size)), nn.Parameter(torch.tensor(0.1))
        self.control = Linear(config.control, config.hidden_size, False)

    def forward(self, x, now):
        x = x + self.shift
        if now.control is not None:
            x = x + self.control(now.control.to(x.dtype))
        return self.block(x, now) * self.alpha


class Layers(nn.Module):
    """Ordinary layers, x + B(x)."""

    def __init__(self, config, count):
        super().__init__()
        form = config.block["ordinary_form"]
        self.blocks = nn.ModuleList(Block(config, form) for _ in range(count))

    def forward(self, x, now):
        for block in self.blocks:
            x = x + block(x, now)
        return x


class Flow(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.grid = config.flow
        made = Block if config.control is None else Controlled
        self.blocks = nn.ModuleList(made(config, config.block["form"]) for _ in range(self.grid["blocks"]))

    def forward(self, x, now):
        grid, y = self.grid, x
        for k, rows in enumerate(grid["rows"]):
            if grid["coupling"] is None:
                x = x + self.increment(x, rows, grid["step"], now)
                continue
            y = y * grid["coupling"] + x * (1.0 - grid["coupling"]) + self.increment(x, rows, grid["step"], now)
            x = x - self.increment(y, grid["back"][k], -grid["step"], now)
        return x if grid["coupling"] is None else y

    def increment(self, x, rows, step, now):
        """h sum_i b_i k_i,  k_i = B(x + h sum_j a_ij k_j) with the weights of stage i."""
        ks = []
        for a, row in zip(self.grid["a"], rows):  # noqa: B905
            ahead = sum((k * c for k, c in zip(ks, a) if c), start=0.0)  # noqa: B905
            ks.append(self.blocks[row](x + step * ahead if a else x, now))
        return step * sum(k * b for k, b in zip(ks, self.grid["b"]) if b)  # noqa: B905


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        positions = 0 if config.block["kind"] == "llama" else config.max_position_embeddings
        self.position_embeddings = nn.Embedding(positions, config.hidden_size) if positions else None


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.prelude = Layers(config, config.prelude_layers)
        self.flow = Flow(config)
        self.coda = Layers(config, config.coda_layers)
        self.norm = norm(config, config.block["norm_eps"], config.block["bias"])

    def forward(self, x, now):
        return self.norm(self.coda(self.flow(self.prelude(x, now), now), now))


class QkvflowForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = QkvflowConfig
    _no_split_modules = ["Block", "Controlled"]  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.transformer = Transformer(config)
        width, vocab, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(width, vocab, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, Linear | nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def get_input_embeddings(self):
        return self.embeddings.token_embeddings

    def get_output_embeddings(self):
        return self.lm_head

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` creates a FlowCache

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        control=None,
        logits_to_keep=0,
        **others,
    ):
        """`control`: [batch, control], or [batch, position, control] for the positions of `input_ids`."""
        x = self.embeddings.token_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        (batch, length), device = x.shape[:2], x.device
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = FlowCache()
        if past_key_values is not None and not isinstance(past_key_values, FlowCache):
            raise ValueError("past_key_values must come from this model")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        unmasked = torch.ones(batch, past + length, dtype=torch.bool, device=device)
        real = unmasked if attention_mask is None else attention_mask.bool()
        if position_ids is None:
            position_ids = (real.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        places = torch.arange(past + length, device=device)
        seen = (places[None, :] <= places[past:, None])[None] & real[:, None, :]
        mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
        if self.embeddings.position_embeddings is not None:
            x = x + self.embeddings.position_embeddings(position_ids)
        control = control[:, None] if control is not None and control.dim() == 2 else control
        now = Pass(mask, real[:, past:], self._rotation(position_ids), control, past_key_values)
        x = self.transformer(x, now)
        if logits_to_keep:
            x = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        head = self.embeddings.token_embeddings if self.lm_head is None else self.lm_head
        logits = F.linear(x, head.weight)
        sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": others.get("num_items_in_batch")}
        loss = None if labels is None else self.loss_function(logits, labels, **sizes)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def prepare_inputs_for_generation(self, input_ids, control=None, **kwargs):
        """Of a control for each position, the part of this step's tokens; those after the prompt have none."""
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if control is not None and control.dim() == 3 and inputs.get("input_ids") is not None:
            end, new = input_ids.shape[1], inputs["input_ids"].shape[1]
            control = F.pad(control, (0, 0, 0, max(0, end - control.shape[1])))[:, end - new : end]
        return {**inputs, "control": control}

    def _rotation(self, position_ids):
        if self.config.block.get("frequencies") is None:
            return None
        frequencies = torch.tensor(self.config.block["frequencies"], dtype=torch.float32, device=position_ids.device)
        angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)[:, None]
        scale = self.config.block["rotation_scale"]
        return angles.cos() * scale, angles.sin() * scale
