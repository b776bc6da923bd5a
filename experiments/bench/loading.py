"""The time of making batches of a text: many examples at once, as here, and one by one, as Levanter makes them.

Training waits for batches that take longer than its steps. The loader's thread is off, so that no batch is made while
another is timed.
"""

import dataclasses
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import haliax as hax
import jax
from levanter.data import DataLoader
from levanter.data.text import LmDataConfig
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule
from levanter.trainer import TrainerConfig

from experiments.bench.frame import Benchmark, Call, Rows, interleaved, run
from qkvflow.data import DataConfig
from qkvflow.data.resolved import ResolvedDataConfig

SEQUENCE, BATCH, BATCHES, ROUNDS = 128, 32, 32, 21


class LevantersData(ResolvedDataConfig):
    """The same data with examples that Levanter makes one by one."""

    build_token_datasets = LmDataConfig.build_token_datasets
    train_set = LmDataConfig.train_set
    validation_sets = LmDataConfig.validation_sets

    @staticmethod
    def like(own: ResolvedDataConfig) -> "LevantersData":
        return LevantersData(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})


def _batches(data: ResolvedDataConfig) -> Iterator[LmExample]:
    trainer, Pos = TrainerConfig(train_batch_size=BATCH), hax.Axis("position", SEQUENCE)
    return iter(
        DataLoader(
            data.train_set(Pos, BatchSchedule(BATCH), key=jax.random.PRNGKey(0)),
            batch_size=BATCH,
            max_buffered_batches=0,
            mesh=trainer.device_mesh,
            axis_resources=trainer.compute_axis_mapping,
        )
    )


def measure() -> Rows:
    logging.getLogger("levanter.data.loader").setLevel(logging.ERROR)  # it warns whenever batches are waited for
    with tempfile.TemporaryDirectory() as folder:
        own = DataConfig(cache_dir=folder).resolve(Path(folder) / "tokenizer")
        makers = {"Levanter": _batches(LevantersData.like(own)), "here": _batches(own)}

        def call(batches: Iterator[LmExample]) -> Call:
            return lambda: jax.tree.leaves(list(itertools.islice(batches, BATCHES)))

        rows = interleaved({name: call(batches) for name, batches in makers.items()}, ROUNDS)
    return {name: {"milliseconds_per_batch": 1e3 * row["seconds"] / BATCHES, **row} for name, row in rows.items()}


SETTINGS = {"batch": BATCH, "sequence": SEQUENCE, "batches": BATCHES}
BENCHMARKS = (Benchmark("loading", SETTINGS, measure),)

if __name__ == "__main__":
    run(BENCHMARKS)
