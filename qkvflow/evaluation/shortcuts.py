"""What is cheaper than the full model, beside it: tokens that stop early, and caches that steps share."""

from collections.abc import Sequence

from levanter.models.lm_model import LmExample

from qkvflow.generation.forced import CacheReading, ExitReading, ForcedReader, read_with_cache
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing
from qkvflow.progress import Progress


def read_exits(
    model: NeuralOdeLMHeadModel,
    examples: Sequence[LmExample],
    exits: ExitConfig,
    progress: Progress,
    calibrate: float | None = None,
) -> list[ExitReading]:
    """The full model, and the one with exits; with `calibrate`, at the threshold that costs that many nats."""
    reader = ForcedReader(model, exits)
    with progress.phase("The full model"):
        full = reader.read(examples, 0.0)
    if calibrate is not None:
        with progress.phase(f"Searching for the threshold of {exits.rule}"):
            return [full, reader.calibrate(examples, calibrate, full.loss)]
    with progress.phase(f"{exits.rule} below {exits.threshold:g}"):
        return [full, reader.read(examples, exits.threshold)]


def read_caches(
    model: NeuralOdeLMHeadModel, examples: Sequence[LmExample], caches: Sequence[CacheSharing], progress: Progress
) -> list[CacheReading]:
    """The exact cache, and each of `caches`."""
    readings = []
    for sharing in dict.fromkeys([EXACT, *caches]):
        with progress.phase(f"Cache: {sharing}"):
            readings.append(read_with_cache(model, sharing, examples))
    return readings


def exits_table(readings: Sequence[ExitReading]) -> str:
    lines = [f"{'rule':<10}{'threshold':>11}{'evaluations':>13}{'of':>5}{'loss':>9}"]
    lines += [f"{r.rule:<10}{r.threshold:>11.4g}{r.evaluations:>13.2f}{r.of:>5}{r.loss:>9.4f}" for r in readings]
    return "\n".join(lines)


def caches_table(readings: Sequence[CacheReading]) -> str:
    lines = [f"{'cache':<10}{'kept':>6}{'of':>5}{'bytes per token':>17}{'loss':>9}"]
    lines += [f"{r.cache:<10}{r.kept:>6}{r.of:>5}{r.bytes_per_token:>17,}{r.loss:>9.4f}" for r in readings]
    return "\n".join(lines)
