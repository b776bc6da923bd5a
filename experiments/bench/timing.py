"""Side by side timing: interleaved runs, medians, and medians of ratios, because machines are noisy."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import jax

Rows = Mapping[str, Mapping[str, float]]
RESULTS = Path(__file__).parent / "results"


def seconds(run: Callable[[], object]) -> float:
    """Of one run, until the arrays that it returns are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, reference: str) -> Rows:
    """Times each run once per round, in turn. Each callable returns arrays to wait for.

    Returns:
        name -> {seconds: median, ratio: median over rounds of time / time of `reference` in the same round,
        ratio_low, ratio_high: quartiles of that ratio}.
    """
    for run in runs.values():  # compile and warm up
        seconds(run)
        seconds(run)
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    rows = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[reference], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        middle = {"seconds": statistics.median(own), "ratio": statistics.median(ratios)}
        rows[name] = middle | {"ratio_low": low, "ratio_high": high}
    return rows


def report(name: str, settings: Mapping[str, object], rows: Rows) -> None:
    """Prints a table and writes results/<name>.json."""
    columns = list(next(iter(rows.values())))
    width = max(len(row) for row in rows)
    print(f"\n{name}: {', '.join(f'{k} {v}' for k, v in settings.items())}")
    print(" " * width, *(f"{c:>14}" for c in columns))
    for row, values in rows.items():
        print(f"{row:<{width}}", *(f"{values[c]:>14.4g}" for c in columns))
    RESULTS.mkdir(exist_ok=True)
    device = jax.devices()[0]
    record = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else platform.machine(),
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "settings": settings,
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
