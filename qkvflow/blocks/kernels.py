"""Which kernel computes attention: the one that is named, or the best of this platform, if it can take what there is.

| `attn_backend` | is | needs |
|---|---|---|
| not given, or `default` | `splash` on TPUs, `nvte` on GPUs, `jax_flash` elsewhere | |
| `splash` | JAX's Pallas kernel for TPUs | positions in 128s; no attn_pdrop |
| `nvte` | NVIDIA's Transformer Engine (cuDNN) | that package; 16-bit numbers; a head size in 8s |
| `jax_flash` | Levanter's flash attention in JAX, in blocks | positions in whole blocks of 1024; no attn_pdrop |
| `vanilla` | all scores at once | nothing |

What one cannot take goes to the next that can: the platform's best, `jax_flash`, `vanilla`; and that is told.
"""

import functools
import importlib.util
import warnings

import jax.numpy as jnp
from levanter.layers import attention as levanter_attention
from levanter.layers.attention import AttentionBackend
from levanter.models.flash_attention import BLOCK_SIZE

from qkvflow.errors import Notice

_LANES = 128  # of a TPU: what splash divides positions into
_ALIGNED = 8  # numbers that cuDNN reads at once


def choose_kernel(
    named: AttentionBackend | None, block_size: int | None, positions: int, head_size: int, dtype, dropout: float
) -> AttentionBackend:
    """The kernel for so many queries and as many keys, in Levanter's names. A fallback from what is named, or from the
    best of an accelerator, is told once (`Notice`).

    Args:
        named: None or `default` for the best of this platform.
        block_size: of splash and flash attention; their own if not given.
        dropout: of the attention weights, in this pass.
    """
    best = levanter_attention.default_attention_type()
    wanted = best if named in (None, AttentionBackend.DEFAULT) else AttentionBackend(named)
    why = ""
    for kernel in (wanted, best, AttentionBackend.JAX_FLASH, AttentionBackend.VANILLA):
        obstacle = _obstacle(kernel, best, block_size, positions, head_size, dtype, dropout)
        if not obstacle:
            # Where nobody named one, a CPU's choice between its two is of no interest.
            if kernel is not wanted and (named is not None or best is not AttentionBackend.JAX_FLASH):
                _tell(f"attention cannot be computed by {wanted.value}: {why}. Falling back to {kernel.value}")
            # Levanter itself falls back from its default, and tells it, for reasons that only the kernel knows.
            return AttentionBackend.DEFAULT if kernel is best else kernel
        why = why or obstacle
    raise AssertionError("vanilla takes everything")


def _obstacle(
    kernel: AttentionBackend, best: AttentionBackend, block_size, positions: int, head_size: int, dtype, dropout: float
) -> str:
    """Why a kernel cannot take this; "" if it can."""
    block = block_size or BLOCK_SIZE
    match kernel:
        case AttentionBackend.SPLASH if best is not kernel:
            return "it is for TPUs"
        case AttentionBackend.NVTE if best is not kernel:
            return "it is for NVIDIA's GPUs"
        case AttentionBackend.SPLASH if positions % _LANES:
            return f"it takes positions in multiples of {_LANES}, not {positions}"
        case AttentionBackend.SPLASH if block_size and block_size % _LANES:
            return f"it takes a flash_attention_block_size in multiples of {_LANES}, not {block_size}"
        case AttentionBackend.NVTE if importlib.util.find_spec("transformer_engine") is None:
            return "Transformer Engine is not installed"
        case AttentionBackend.NVTE if jnp.dtype(dtype).itemsize > 2:
            return f"it takes bf16 and fp16, not {jnp.dtype(dtype).name}"
        case AttentionBackend.NVTE if head_size % _ALIGNED:
            return f"it takes head sizes in multiples of {_ALIGNED}, not {head_size}"
        case AttentionBackend.JAX_FLASH if positions % block:
            return f"it takes positions in whole blocks of {block} (flash_attention_block_size), not {positions}"
        # Levanter's flash attention drops scores instead: a dropped one becomes 0, which is no small weight.
        case AttentionBackend.SPLASH | AttentionBackend.JAX_FLASH if dropout > 0:
            return "it has no dropout of the attention weights (attn_pdrop)"
    return ""


@functools.cache
def _tell(text: str) -> None:
    warnings.warn(Notice(text), stacklevel=4)
