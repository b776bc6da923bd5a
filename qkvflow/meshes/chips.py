"""Peak rates of chips, for rooflines, each with its source.

All figures are for one device as JAX counts them (a chip; the two cores of a TPU v4 or v5p work as one), without
sparsity. Bandwidths between chips are for one direction: vendors state the sum of both.

Sources
    v4    docs.cloud.google.com/tpu/docs/v4: 275 TFLOP/s (bf16), 32 GiB, 1200 GB/s. Links: Jouppi et al., "TPU v4"
          (arXiv:2304.01433, table 4): 6 links of 50 GB/s each way.
    v5e   docs.cloud.google.com/tpu/docs/v5e: 197 TFLOP/s (bf16), 16 GB, 819 GB/s, links 400 GB/s both ways.
    v5p   docs.cloud.google.com/tpu/docs/v5p: 459 TFLOP/s (bf16), 95 GiB, 2765 GB/s, links 1200 GB/s both ways.
    v6e   docs.cloud.google.com/tpu/docs/v6e: 918 TFLOP/s (bf16), 32 GB, 1638 GB/s, links 800 GB/s both ways.
    a100  NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s (bf16), 156 (TF32), 80 GB, 2039 GB/s, NVLink 600 GB/s both ways.
          DGX A100 data sheet: a ConnectX-6 of 200 Gb/s for each GPU.
    h100  NVIDIA H100 SXM data sheet, halved (it states sparsity): 989.5 TFLOP/s (bf16), 494.5 (TF32), 80 GB, 3350 GB/s,
          NVLink 900 GB/s both ways. DGX H100 data sheet: a ConnectX-7 of 400 Gb/s for each GPU. Its NVSwitch reduces:
          developer.nvidia.com/blog/upgrading-multi-gpu-interconnectivity-with-the-third-generation-nvidia-nvswitch.
    h200  NVIDIA H200 SXM data sheet: as h100, but 141 GB, 4800 GB/s.
    b200  NVIDIA HGX/DGX B200 data sheet, an eighth, halved: 2250 TFLOP/s (bf16), 1100 (TF32), 180 GB, 8000 GB/s, NVLink
          1800 GB/s both ways, a ConnectX-7 of 400 Gb/s for each GPU.

Matrix products of fp32 arrays run in one pass of bf16 on TPUs, and in TF32 on GPUs, at JAX's default precision.
A program cannot use all of the memory: a TPU's compiler reserves some (v5e: 15.75 of 16 GiB available).
"""

from dataclasses import dataclass

GB = 10**9
GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """
    Attributes:
        platform: `tpu` or `gpu`, as JAX names it.
        flops, flops_fp32: matrix-product FLOPs per second, for bf16 and fp32 arrays.
        memory: bytes.
        bandwidth: of the memory, bytes per second.
        links: bytes per second to other chips of the same slice (TPU) or machine (GPU), one way, all links combined.
        network: bytes per second to other machines, one way; equal to `links` for a TPU slice.
        dimensions: of a slice's torus, for a TPU.
        name: as JAX names such a device.
        switches_add: the switches between the GPUs of a machine add what they receive (NVLink SHARP).
    """

    platform: str
    flops: float
    flops_fp32: float
    memory: int
    bandwidth: float
    links: float
    network: float
    dimensions: int = 0
    name: str = ""
    switches_add: bool = False


def _tpu(flops: float, memory: int, bandwidth: float, links: float, dimensions: int) -> Chip:
    return Chip("tpu", flops, flops, memory, bandwidth, links, links, dimensions)


CHIPS = {
    "v4": _tpu(275e12, 32 * GIB, 1200e9, 300e9, 3),
    "v5e": _tpu(197e12, 16 * GIB, 819e9, 200e9, 2),
    "v5p": _tpu(459e12, 95 * GIB, 2765e9, 600e9, 3),
    "v6e": _tpu(918e12, 32 * GIB, 1638e9, 400e9, 2),
    "a100": Chip("gpu", 312e12, 156e12, 80 * GB, 2039e9, 300e9, 25e9, name="NVIDIA A100-SXM4-80GB"),
    "h100": Chip(
        "gpu", 989.5e12, 494.5e12, 80 * GB, 3350e9, 450e9, 50e9, name="NVIDIA H100 80GB HBM3", switches_add=True
    ),
    "h200": Chip("gpu", 989.5e12, 494.5e12, 141 * GB, 4800e9, 450e9, 50e9, name="NVIDIA H200", switches_add=True),
    "b200": Chip("gpu", 2250e12, 1100e12, 180 * GB, 8000e9, 900e9, 50e9, name="NVIDIA B200", switches_add=True),
}

GPUS_PER_MACHINE = 8
