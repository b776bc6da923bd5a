"""Side by side timing: interleaved runs, medians, and medians of ratios, because machines are noisy."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import jax

RESULTS = Path(__file__).parent / "results"


def interleaved(runs: dict[str, Callable[[], object]], rounds: int, reference: str) -> dict[str, dict[str, float]]:
    """Time each run once per round, in turn. Each callable returns arrays to wait for.

    Returns:
        name -> {seconds: median, ratio: median over rounds of time / time of `reference` in the same round,
        ratio_low, ratio_high: quartiles of that ratio}.
    """
    for run in runs.values():  # compile and warm up
        jax.block_until_ready(run())
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    rows = {}
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[reference], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "ratio_low": low,
            "ratio_high": high,
        }
    return rows


def report(name: str, settings: dict, rows: dict[str, dict[str, float]]) -> None:
    """Print a table and write results/<name>.json."""
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
