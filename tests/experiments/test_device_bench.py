"""The benchmark of one device, on this machine's CPU, at a size that shows nothing but that all of it runs."""

import math

import pytest

from experiments.bench import device
from qkvflow.meshes.chips import CHIPS


@pytest.mark.slow
def test_all_rows_are_measured():
    rows = device.benchmark(device.SMALL).measure()
    trained = [f"{model}, {precision}" for precision in ("bf16", "fp32") for model in device.models(device.SMALL)]
    assert list(rows) == [*trained, *(f"decoding: {name}" for name in ("levanter gpt2", "flow", "flow, drafted"))]
    for name, row in rows.items():
        assert row["seconds"] > 0, name
        assert row["tokens_per_second"] > 0, name
        assert all(math.isfinite(value) for value in row.values()), name
        assert "mfu" not in row  # of a CPU no peak is known
    # Without activations kept for the backward pass, less memory.
    assert rows["flow, checkpoint, fp32"]["GiB"] < rows["flow, direct, fp32"]["GiB"]


@pytest.mark.parametrize(
    ("kind", "chip"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H200", "h200")],
)
def test_devices_are_known_by_the_names_that_jax_gives_them(monkeypatch, kind, chip):
    class Device:
        device_kind = kind

    monkeypatch.setattr("jax.devices", lambda: [Device()])
    assert device.peak_flops() == CHIPS[chip].flops
