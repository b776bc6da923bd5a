"""What is cheaper than the full model, beside it: tokens that stop early, and caches that steps share."""

from collections.abc import Callable, Sequence

import equinox as eqx
from levanter.models.lm_model import LmExample

from qkvflow.generation.forced import CacheReading, ExitReading, ForcedReader, read_with_cache
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.cached import CachedModel
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing
from qkvflow.progress import Progress


def read_exits(
    model: NeuralOdeLMHeadModel,
    text: Callable[[], Sequence[LmExample]],
    exits: ExitConfig,
    progress: Progress,
    calibrate: float | None = None,
) -> list[ExitReading]:
    """The full model, and the one with exits; with `calibrate`, at the threshold that costs that many nats.

    Args:
        text: reads the examples, once it is known that the model has such exits.
    """
    reader, examples = ForcedReader(model, exits), text()
    with progress.phase("The full model"):
        full = reader.read(examples, 0.0)
    if calibrate is not None:
        with progress.phase(f"Searching for the threshold of {exits.rule}"):
            return [full, reader.calibrate(examples, calibrate, full.loss)]
    with progress.phase(f"{exits.rule} below {exits.threshold:g}"):
        return [full, reader.read(examples, exits.threshold)]


def read_caches(
    model: NeuralOdeLMHeadModel,
    text: Callable[[], Sequence[LmExample]],
    caches: Sequence[CacheSharing],
    progress: Progress,
) -> list[CacheReading]:
    """The exact cache, and each of `caches`.

    Args:
        text: reads the examples, once it is known that the model can have such caches.
    """
    wanted = list(dict.fromkeys([EXACT, *caches]))
    for sharing in wanted:
        eqx.filter_eval_shape(CachedModel.of, model, None, sharing)
    readings, examples = [], text()
    for sharing in wanted:
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
