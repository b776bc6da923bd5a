"""The benchmark of one device, on this machine's CPU, at a size that shows nothing but that all of it runs."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import device, frame
from qkvflow.meshes.chips import CHIPS


@pytest.mark.slow
def test_all_rows_are_measured():
    rows = dict(device.benchmark(device.SMALL).measure())
    trained = [f"{model}, {precision}" for precision in ("bf16", "fp32") for model in device.models(device.SMALL)]
    assert list(rows) == [*trained, *(f"decoding: {name}" for name in ("levanter gpt2", "flow", "flow, drafted"))]
    for name, row in rows.items():
        assert row["seconds"] > 0, name
        assert row["tokens_per_second"] > 0, name
        assert all(math.isfinite(value) for value in row.values()), name
        assert "mfu" not in row  # of a CPU no peak is known
    # Without activations kept for the backward pass, less memory.
    assert rows["flow, checkpoint, fp32"]["GiB"] < rows["flow, direct, fp32"]["GiB"]


def test_a_model_without_memory_is_left_out(monkeypatch, capsys):
    def step(config, size, policy):
        if getattr(config, "depth", None) is not None and config.depth.adjoint == "direct":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return (lambda: jnp.zeros(())), 2**30

    monkeypatch.setattr(device, "training_step", step)
    rows = dict(device.training(device.SMALL))
    left_out = {f"flow, direct, {precision}" for precision in ("bf16", "fp32")}
    assert len(rows) == 2 * (len(device.models(device.SMALL)) - 1)
    assert not left_out & set(rows)
    assert "flow, direct, bf16: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "chip"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H200", "h200")],
)
def test_devices_are_known_by_the_names_that_jax_gives_them(monkeypatch, kind, chip):
    class Device:
        device_kind = kind

    monkeypatch.setattr("jax.devices", lambda: [Device()])
    assert device.peak_flops() == CHIPS[chip].flops
    assert device.peak_flops("fp32") == CHIPS[chip].flops_fp32


def test_rows_that_are_measured_are_written_before_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(frame, "RESULTS", tmp_path)

    def measure():
        yield "first", {"seconds": 1.0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        frame.Benchmark("device_x", {}, measure).run()
    assert json.loads((tmp_path / "device_x.partial.json").read_text())["rows"] == {"first": {"seconds": 1.0}}
    assert not (tmp_path / "device_x.json").exists()  # an earlier, complete one would be kept
    frame.Benchmark("device_x", {}, lambda: {"first": {"seconds": 1.0}}).run()
    assert [path.name for path in tmp_path.iterdir()] == ["device_x.json"]


def test_ratios_are_of_the_same_round(monkeypatch):
    """Two calls on a machine that becomes ten times slower: each round has the ratio 3."""
    taken = iter([0.0] * 4 + [1.0, 3.0, 1.0, 3.0, 10.0, 30.0])  # four to warm up
    monkeypatch.setattr(frame, "seconds", lambda call: next(taken))
    rows = frame.interleaved({"one": lambda: None, "other": lambda: None}, rounds=3)
    assert rows["one"] == {"seconds": 1.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    assert rows["other"] == {"seconds": 3.0, "ratio": 3.0, "ratio_low": 3.0, "ratio_high": 3.0}
