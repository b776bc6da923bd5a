"""The devices of a target, as JAX describes other machines. Only for a process that compiles and exits."""

from typing import Any

import jax
from jax.experimental import topologies

from qkvflow.errors import UserError
from qkvflow.inside.topology import be_elsewhere
from qkvflow.meshes.target import Target

# From NVIDIA's CUDA programming guide and architecture white papers: compute capability, multiprocessors, fp32 units
# and shared memory of each, maximum shared memory per block, L2 cache, GHz.
_GPUS = {
    "a100": ("major: 8 minor: 0", 108, 64, 167936, 166912, 40 << 20, 1.41),
    "h100": ("major: 9 minor: 0", 132, 128, 233472, 232448, 50 << 20, 1.98),
    "h200": ("major: 9 minor: 0", 132, 128, 233472, 232448, 50 << 20, 1.98),
    "b200": ("major: 10 minor: 0", 148, 128, 233472, 232448, 126 << 20, 1.965),
}


def move_to(target: Target) -> list[int]:
    """Makes JAX, Levanter and Haliax find the target's devices; returns the machine of each of them.

    Raises:
        UserError: the compiler does not know this topology.
    """
    try:
        devices = _tpus(target) if target.chip.platform == "tpu" else _gpus(target)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler of {target.kind} has no topology {target.topology}: {error}") from None
    if len(devices) != target.devices:
        raise UserError(f"the compiler of {target.kind} makes {len(devices)} devices of {target.topology}")
    be_elsewhere(devices, target.chip.platform)
    return [d.process_index for d in devices]


def _tpus(target: Target) -> list[Any]:
    options: dict[str, Any] = {"chip_config_name": "megacore"} if target.kind == "v4" else {}
    if target.devices == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{target.kind}:{target.topology}"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _gpus(target: Target) -> list[Any]:
    jax.devices()  # loads the plugin
    options = {"target_config": _config(target), "topology": f"1x{target.topology}"}
    return topologies.get_topology_desc("x", "cuda", **options).devices


def _config(target: Target) -> str:
    """XLA's GpuTargetConfig, as text."""
    capability, cores, units, shared, shared_block, cache, clock = _GPUS[target.kind]
    chip = target.chip
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
        "device_memory_size": chip.memory,
        "shared_memory_per_block_optin": shared_block,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    device = " ".join(f"{name}: {value}" for name, value in fields.items())
    device += f" cuda_compute_capability {{ {capability} }}"
    return (
        f"gpu_device_info {{ {device} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 patch: 0 }\n"
        f'device_description_str: "{chip.name}"\n'
    )
