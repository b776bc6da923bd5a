"""Chooses the attention kernel: the one that is configured or the best of the platform, if it can handle the shapes.

| `attn_backend` | is | requires |
|---|---|---|
| unset, or `default` | `splash` on TPUs, `nvte` on GPUs, `jax_flash` elsewhere | |
| `splash` | JAX's Pallas kernel for TPUs | positions and block size divisible by 128; no dropout of the weights |
| `nvte` | NVIDIA's Transformer Engine (cuDNN) | that package; a 16-bit dtype; a head size divisible by 8 |
| `jax_flash` | Levanter's blockwise flash attention | positions in blocks (1024); no dropout of the weights |
| `vanilla` | computes all scores at once | nothing |

If a kernel cannot handle the shapes, the next that can is used, with a notice: the platform's best, `jax_flash`,
`vanilla`.
"""

import functools
import importlib.util
import warnings

import jax.numpy as jnp
from levanter.layers import attention as levanter_attention
from levanter.layers.attention import AttentionBackend
from levanter.models.flash_attention import BLOCK_SIZE

from qkvflow.errors import Notice

_LANES = 128  # of a TPU; splash needs positions in multiples of it
_ALIGNED = 8  # cuDNN needs head sizes in multiples of it


def choose_kernel(
    named: AttentionBackend | None,
    block_size: int | None,
    positions: int,
    head_size: int,
    dtype: jnp.dtype,
    dropout: float,
) -> AttentionBackend:
    """The kernel for as many queries as keys, by Levanter's names. A fallback from the configured kernel, or from the
    best one of an accelerator, gives a `Notice` once.

    Args:
        named: None or `default` for the best kernel of this platform.
        block_size: of splash and flash attention; None for their defaults.
        dropout: of the attention weights, in this pass.
    """
    best = levanter_attention.default_attention_type()
    wanted = best if named in (None, AttentionBackend.DEFAULT) else AttentionBackend(named)
    why = ""
    for kernel in (wanted, best, AttentionBackend.JAX_FLASH, AttentionBackend.VANILLA):
        obstacle = _obstacle(kernel, best, block_size, positions, head_size, dtype, dropout)
        if not obstacle:
            # On CPUs, the choice between flash attention and vanilla is not worth a notice.
            if kernel is not wanted and (named is not None or best is not AttentionBackend.JAX_FLASH):
                _tell(f"attention cannot be computed by {wanted.value}: {why}. Falling back to {kernel.value}")
            # From its default, Levanter itself falls back (with a warning) for reasons that only the kernel knows.
            return AttentionBackend.DEFAULT if kernel is best else kernel
        why = why or obstacle
    raise AssertionError("vanilla takes everything")


def _obstacle(
    kernel: AttentionBackend,
    best: AttentionBackend,
    block_size: int | None,
    positions: int,
    head_size: int,
    dtype: jnp.dtype,
    dropout: float,
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
        # Levanter's flash attention sets dropped scores to 0, so their weights are not 0.
        case AttentionBackend.SPLASH | AttentionBackend.JAX_FLASH if dropout > 0:
            return "it has no dropout of the attention weights (attn_pdrop)"
    return ""


@functools.cache
def _tell(text: str) -> None:
    warnings.warn(Notice(text), stacklevel=4)
