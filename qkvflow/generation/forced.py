"""Teacher forcing with the caches of generation: the cost of exits and of shared caches, and calibrated thresholds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.models.lm_model import LmExample

from qkvflow.axes import BATCH, CONTROL, POSITION
from qkvflow.blocks import Inputs, Window
from qkvflow.errors import UserError
from qkvflow.generation.documents import Documents, Rows
from qkvflow.models.cached import CachedModel
from qkvflow.models.exits import ExitConfig, ExitMemory
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.models.shared_cache import CacheSharing

_CHUNK = 64  # positions read at once
_HALVINGS = 8  # bisection steps for the threshold, on a logarithmic scale
_LOWEST, _HIGHEST = 1e-6, 1e2  # range of thresholds that is searched


@dataclass(frozen=True)
class ExitReading:
    """The result of reading a text with exits. loss: nats per token.

    Attributes:
        evaluations: mean number of evaluations of the vector field per token.
        of: evaluations of the full model.
    """

    rule: str
    threshold: float
    loss: float
    evaluations: float
    of: int


@dataclass(frozen=True)
class CacheReading:
    """The result of reading a text with a cache shared by evaluations. loss: nats per token.

    Attributes:
        kept: number of evaluations of the flow, out of `of`, that keep keys and values.
        bytes_per_token: growth of the whole model's cache per token.
    """

    cache: str
    kept: int
    of: int
    bytes_per_token: int
    loss: float


def read_with_cache(model: NeuralOdeLMHeadModel, sharing: CacheSharing, examples: Sequence[LmExample]) -> CacheReading:
    """Reads the text as generation does. With `latest` token by token, as generated text is.

    Args:
        model: in inference mode.

    Raises:
        UserError: the model has adaptive steps.
    """
    cached = eqx.filter_jit(CachedModel.of)(model, None, sharing)
    chunk = _CHUNK if sharing.every else 1
    loss, weight, *_ = _totals(cached, examples, chunk)
    evaluations = cached.flow.plan.evaluations
    grows = _memory_bytes(cached, 2) - _memory_bytes(cached, 1)
    return CacheReading(str(sharing), sharing.kept(evaluations), evaluations, grows, loss / weight)


def _memory_bytes(model: CachedModel, length: int) -> int:
    memory = eqx.filter_eval_shape(lambda: model.memory(Axis(BATCH, 1), length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(memory))


class ForcedReader:
    """Reads a text with exits by one rule, at any threshold.

    model: in inference mode.

    Raises:
        UserError: the model has adaptive steps, or does not support such exits.
    """

    def __init__(self, model: NeuralOdeLMHeadModel, exits: ExitConfig):
        # At 0 there would be no rule whose threshold could be changed.
        asked = dataclasses.replace(exits, threshold=exits.threshold or 1.0)
        self._model = eqx.filter_jit(CachedModel.of)(model, asked)
        assert self._model.exit is not None
        self._exit, self._plan = self._model.exit, self._model.flow.plan

    def read(self, examples: Sequence[LmExample], threshold: float) -> ExitReading:
        """Reads the text at this threshold."""
        exits = dataclasses.replace(self._exit, threshold=jnp.asarray(threshold, jnp.float32))
        model = dataclasses.replace(self._model, exit=exits)
        loss, weight, steps, tokens = _totals(model, examples, _CHUNK)
        each = self._plan.evaluations / self._plan.steps
        return ExitReading(exits.rule, threshold, loss / weight, each * steps / tokens, self._plan.evaluations)

    def calibrate(self, examples: Sequence[LmExample], cost: float, loss: float) -> ExitReading:
        """The reading with the highest threshold found that costs at most `cost` nats more than `loss`.

        Raises:
            UserError: even the lowest threshold costs more.
        """
        most = loss + cost
        low, high, best = np.log(_LOWEST), np.log(_HIGHEST), self.read(examples, _LOWEST)
        if best.loss > most:
            raise UserError(
                f"calibrate: exits cost more than {cost} nats even at the threshold {_LOWEST:g}. Allow a higher cost,"
                " or use another rule."
            )
        for _ in range(_HALVINGS):
            reading = self.read(examples, float(np.exp((low + high) / 2)))
            if reading.loss <= most:
                low, best = (low + high) / 2, reading
            else:
                high = (low + high) / 2
        return best


def _totals(model: CachedModel, examples: Sequence[LmExample], chunk_size: int) -> list[float]:
    """(loss, weight, steps, tokens), summed over all documents of the text."""
    return np.sum(
        [np.asarray(_sums(model, rows, chunk_size), np.float64) for rows in Documents.of(examples)], 0
    ).tolist()


@eqx.filter_jit
def _sums(model: CachedModel, rows: Rows, chunk_size: int):
    """(loss, weight, steps, tokens), summed over a batch; reads `chunk_size` positions at a time."""
    size, length = rows.tokens.shape
    Batch, New = Axis(BATCH, size), Axis(POSITION, chunk_size)
    rest = -length % chunk_size
    first = hax.named(rows.first, Batch)

    def chunk(index, carry):
        memory, loss = carry
        at = index * chunk_size

        def piece(a):
            filled = jnp.pad(a, [(0, 0), (0, rest)] + [(0, 0)] * (a.ndim - 2))
            return jax.lax.dynamic_slice_in_dim(filled, at, chunk_size, axis=1)

        window = Window(hax.full(Batch, at), hax.named(jnp.clip(rows.count - at, 0, chunk_size), Batch))
        control = None
        if rows.control is not None:
            control = hax.named(piece(rows.control), (Batch, New, Axis(CONTROL, rows.control.shape[-1])))
        given = Inputs(control=control, window=window, pos_ids=first + window.positions(New))
        x, memory = model.extend(hax.named(piece(rows.tokens), (Batch, New)), given, memory)
        logits = model.logits(x).rearrange((BATCH, POSITION, "vocab")).array
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), piece(rows.targets)[..., None], axis=-1)[..., 0]
        return memory, loss - jnp.sum(log_p * piece(rows.weight))

    start = (model.memory(Batch, length + rest), jnp.float32(0))
    chunks = -(-jnp.max(rows.count) // chunk_size)
    memory, loss = jax.lax.fori_loop(0, chunks, chunk, start)
    spent = memory[1].spent if isinstance(memory[1], ExitMemory) else jnp.zeros((size, 2))
    steps, count = jnp.sum(spent, axis=0)
    return loss, jnp.sum(rows.weight), steps.astype(jnp.float32), count.astype(jnp.float32)
