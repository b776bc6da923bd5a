"""Benchmarks and the comparison of times: interleaved runs and medians of ratios, because machines are noisy."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import jax

from experiments.records import device_name
from experiments.tables import Table
from qkvflow.files import write_text

Call = Callable[[], object]
Row = tuple[str, Mapping[str, float]]
Rows = Mapping[str, Mapping[str, float]]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Benchmark:
    """name: of its JSON. settings: shown with it. measure: name of a row -> its numbers, or these in turn, which are
    also written one by one, to <name>.partial.json, so that they are not lost if the program ends before its time."""

    name: str
    settings: Mapping[str, object]
    measure: Callable[[], Rows | Iterator[Row]]

    def run(self) -> None:
        """Prints a table and writes results/<name>.json."""
        found, rows = self.measure(), {}
        for name, row in found.items() if isinstance(found, Mapping) else found:
            rows[name] = row
            if not isinstance(found, Mapping):
                self._write(rows, ".partial")
        self._write(rows)
        (RESULTS / f"{self.name}.partial.json").unlink(missing_ok=True)
        table = Table.of({"": row} | {key: f"{x:.4g}" for key, x in own.items()} for row, own in rows.items())
        print(f"\n{self.name}: {', '.join(f'{k} {v}' for k, v in self.settings.items())}\n\n{table}", flush=True)

    def _write(self, rows: Rows, suffix: str = "") -> None:
        where = {"device": device_name(), "devices": jax.device_count(), "jax": jax.__version__}
        record = {"benchmark": self.name, "date": date.today().isoformat(), **where}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(record | {"settings": self.settings, "rows": rows}, indent=2)
        write_text(RESULTS / f"{self.name}{suffix}.json", text + "\n")


def run(benchmarks: Iterable[Benchmark]) -> None:
    for benchmark in benchmarks:
        benchmark.run()


def seconds(call: Call) -> float:
    """Time of one run, until the arrays that it returns are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleaved(calls: Mapping[str, Call], rounds: int = 15) -> Rows:
    """Times each call once per round, in turn. Each returns arrays to wait for.

    Returns:
        name -> {seconds: median, ratio: median over rounds of time / time of the first call in the same round,
        ratio_low, ratio_high: quartiles of that ratio}.
    """
    for call in calls.values():  # compile and warm up
        seconds(call)
        seconds(call)
    times = [[seconds(call) for call in calls.values()] for _ in range(rounds)]
    rows = {}
    for k, name in enumerate(calls):
        middle = statistics.median(own[k] for own in times)
        rows[name] = {"seconds": middle, **spread("ratio", [own[k] / own[0] for own in times])}
    return rows


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median, and the quartiles as `_low` and `_high`."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {name: statistics.median(values), f"{name}_low": low, f"{name}_high": high}
