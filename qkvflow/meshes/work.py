"""The work of a compiled step on one device: FLOPs of matrix products, and memory traffic."""

import re
from collections.abc import Iterator
from math import prod

import numpy as np

from qkvflow.meshes.hlo import Array, Instruction, Program

# Instructions that move nothing; their arrays are counted where they are produced or read.
_FREE = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant", "after-all"),
    *("optimization-barrier", "partition-id", "replica-id", "async-start", "async-update", "add-dependency"),
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
_SLICES = {"dynamic-slice", "slice", "gather"}
# Matrix products in each kernel of splash attention.
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4, "splash_mqa_fwd": 2}
_SPLASH |= {"splash_mqa_dq": 3, "splash_mqa_dkv": 4}
_SPLASH_BLOCK = 512  # Levanter's


def matrix_flops(program: Program, dtype: str | None = None) -> float:
    """Multiplications and additions in matrix products, per run on one device.

    Splash attention is counted by its shapes, with a causal mask, whose empty blocks it skips.

    Args:
        dtype: only count products of such arrays, in XLA's notation (`f32`).
    """
    total = 0.0
    for found in program.computations.values():
        shapes = {i.name: i.results for i in found}
        for i in found:
            if dtype is None or _dtype(i, shapes) == dtype:
                total += i.times * _flops(i, shapes)
    return total


def memory_traffic(program: Program) -> float:
    """Bytes read from and written to the device's memory in one run: the inputs and outputs of each instruction.

    If a slice of an array is read or written, only the slice counts; on-chip memory (a TPU's vector memory) costs
    nothing, and within a fusion nothing is stored.
    """
    total = 0.0
    for found in program.computations.values():
        shapes = {i.name: i.results for i in found}
        total += sum(i.times * _traffic(i, shapes, program) for i in found if i.is_stored)
    return total


def _flops(i: Instruction, shapes: dict[str, tuple[Array, ...]]) -> float:
    if i.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        left = _operand(i, 0, shapes)
        axes = [int(a) for a in contracted[1].split(",") if a] if contracted and left else []
        return 2.0 * prod(i.results[0].sizes) * prod(left.sizes[a] for a in axes) if left else 0.0
    if i.op == "convolution":
        return _convolution(i, shapes)
    if i.op == "custom-call":
        return _splash(i, shapes)
    return 0.0


def _convolution(i: Instruction, shapes: dict[str, tuple[Array, ...]]) -> float:
    """The form of all matrix products on a TPU: window positions outside the array cost nothing."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    left, kernel = _operand(i, 0, shapes), _operand(i, 1, shapes)
    if labels is None or left is None or kernel is None:
        return 0.0
    sizes = [
        dict(zip(names, a.sizes, strict=True))
        for names, a in zip(labels.groups(), (left, kernel, i.results[0]), strict=True)
    ]
    window = re.search(r"window=\{([^}]*)\}", i.rest)
    fields = dict(re.findall(r"(\w+)=([\d_x\-]+)", window[1])) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", i.rest)
    count = sizes[0]["b"] // (int(groups[1]) if groups else 1) * sizes[2]["f"] * sizes[1]["i"]
    for d in sorted(name for name in sizes[2] if name.isdigit()):
        pick = {key: value.split("x")[int(d)] for key, value in fields.items()}
        low = int(pick.get("pad", "0_0").split("_")[0])
        steps = (int(pick.get(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        count *= _positions(sizes[0][d], sizes[1][d], sizes[2][d], low, *steps)
    return 2.0 * count


def _positions(size: int, kernel: int, out: int, low: int, stride: int, spread: int, dilation: int) -> int:
    """Pairs of a result position and a window position that meet an element of the array."""
    if size == kernel == out == 1:
        return 1
    places, found = np.arange(out) * stride - low, 0
    for k in range(kernel):
        at = places + k * dilation
        found += int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())
    return found


def _splash(i: Instruction, shapes: dict[str, tuple[Array, ...]]) -> float:
    """From the shapes of keys {..., position, head_size} and queries, which are the first arrays of rank 3 or more."""
    products = next((n for name, n in _SPLASH.items() if name in i.name or name in i.source), 0)
    arrays = [a for name in i.operands for a in shapes.get(name, ()) if len(a.sizes) >= 3 and a.dtype[0] in "bf"]
    if not products or len(arrays) < 2:
        return 0.0
    queries, keys = arrays[0].sizes, arrays[1].sizes
    blocks = max(1, min(queries[-2], keys[-2]) // _SPLASH_BLOCK)
    causal = (blocks + 1) / (2 * blocks) if queries[-2] == keys[-2] else 1.0
    return causal * products * 2.0 * prod(queries) * keys[-2]


def _dtype(i: Instruction, shapes: dict[str, tuple[Array, ...]]) -> str:
    arrays = [a for name in i.operands for a in shapes.get(name, ()) if a.dtype[0] in "bf"]
    return arrays[0].dtype if arrays else ""


def _operand(i: Instruction, place: int, shapes: dict[str, tuple[Array, ...]]) -> Array | None:
    names = i.operands
    arrays = shapes.get(names[place], ()) if place < len(names) else ()
    return arrays[0] if len(arrays) == 1 else None


def _traffic(i: Instruction, shapes: dict[str, tuple[Array, ...]], program: Program) -> int:
    if i.op in _FREE or i.op.endswith("-done"):
        return 0
    if i.op == "custom-call" and any(f'custom_call_target="{name}"' in i.rest for name in _FREE_CALLS):
        return 0
    operands = [[a for a in shapes.get(name, ())] for name in i.operands]
    made = _bytes(i.results)
    if i.op == "fusion":
        called = re.search(r"calls=%?([\w.\-]+)", i.rest)
        inside = program.computations.get(called[1], []) if called else []
        return _fusion(i, operands, inside) if inside else made + sum(map(_bytes, operands))
    if i.op.endswith("-start") and len(i.results) > 1:  # operand and result are parts of its output
        return made
    if i.op in _SLICES:
        return 2 * made
    if i.op == "dynamic-update-slice":
        return 2 * _bytes(operands[1]) if len(operands) > 1 else 0
    if i.op == "scatter":
        return 3 * _bytes(operands[-1]) if operands else 0
    return made + sum(map(_bytes, operands))


def _fusion(i: Instruction, operands: list[list[Array]], inside: list[Instruction]) -> int:
    """Bytes that a fusion reads of each operand, and bytes that it writes; slices only count as such."""
    by_name = {x.name: x for x in inside}
    readers: dict[str, list[Instruction]] = {}
    for x in inside:
        for name in x.operands:
            readers.setdefault(name, []).append(x)
    total, updated = 0, 0
    for x in inside:
        place = re.match(r"(\d+)\)", x.rest) if x.op == "parameter" else None
        if place is None or int(place[1]) >= len(operands):
            continue
        whole = _bytes(operands[int(place[1])])
        parts = [_read(x.name, use, by_name) for use in _through_bitcasts(x.name, readers)]
        total += whole if None in parts else min(whole, sum(p for p in parts if p is not None))
    made = _bytes(i.results)
    for x in inside:
        if x.op == "dynamic-update-slice" and not any(a.space for a in x.results):
            update = by_name.get(x.operands[1]) if len(x.operands) > 1 else None
            if update is not None and _bytes(x.results) <= made - updated:
                updated += _bytes(x.results) - _bytes(update.results)
    return total + made - updated


def _through_bitcasts(name: str, readers: dict[str, list[Instruction]]) -> Iterator[Instruction]:
    for use in readers.get(name, []):
        if use.op == "bitcast":
            yield from _through_bitcasts(use.name, readers)
        else:
            yield use


def _read(name: str, use: Instruction, by_name: dict[str, Instruction]) -> int | None:
    """Bytes of an operand that one use within a fusion reads; None if it reads the whole operand."""
    first = bool(use.operands) and (use.operands[0] == name or _op(use.operands[0], by_name) == "bitcast")
    if use.op in _SLICES and first:
        return sum(a.bytes for a in use.results)
    if use.op == "dynamic-update-slice" and first:  # in place
        return 0
    return None


def _bytes(arrays) -> int:
    return sum(a.bytes for a in arrays if a.space == 0)


def _op(name: str, by_name: dict[str, Instruction]) -> str:
    return by_name[name].op if name in by_name else ""
