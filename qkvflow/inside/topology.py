"""JAX, Haliax and Levanter internals: the devices of another machine in place of those of this process."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import haliax.jax_utils
import haliax.partitioning
import jax
import levanter.layers.rotary
from jax._src import core


def be_elsewhere(devices: Sequence[Any], platform: str) -> None:
    """Makes JAX report `devices` to all callers, for good: only for a process that compiles and exits.

    Reason: Levanter and Haliax ask for the devices of the process and choose kernels by them. JAX compiles for absent
    devices, but cannot present them as those of the process.

    Args:
        devices: of a topology description.
        platform: `tpu` or `gpu`, as `jax.default_backend()` would return there.
    """

    def found(backend: Any = None) -> list[Any]:
        return list(devices) if backend in (None, platform) else jax_devices(backend)

    jax_devices = jax.devices
    here: dict[str, Any] = {"devices": found, "local_devices": lambda *_, backend=None, **__: found(backend)}
    here |= {"device_count": lambda *_: len(devices), "local_device_count": lambda *_: len(devices)}
    here |= {"default_backend": lambda: platform}
    for name, function in here.items():
        setattr(jax, name, function)
    # Reason: Haliax creates an array to check whether it is traced, which would run on one of the devices.
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in ("haliax", "levanter")]:
        if getattr(module, "is_in_jit", None) is haliax.jax_utils.is_in_jit and module is not haliax.jax_utils:
            module.is_in_jit = _is_traced
    haliax.jax_utils.is_in_jit = _is_traced
    # Reason: Levanter precomputes tables of rotary embeddings on a device; here they are part of the program.
    levanter.layers.rotary.jax = _Untimely()


class _Untimely:
    """JAX, except for values computed while a program is traced."""

    ensure_compile_time_eval = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def _is_traced() -> bool:
    return not core.trace_state_clean()
