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

from qkvflow.axes import BATCH, POSITION
from qkvflow.blocks import Inputs, Window
from qkvflow.errors import UserError
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
    loss, weight, *_ = np.sum([np.asarray(_sums(cached, e, chunk), np.float64) for e in examples], axis=0).tolist()
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
        total = sum(np.asarray(_sums(model, example, _CHUNK), np.float64) for example in examples)
        loss, weight, steps, tokens = np.asarray(total).tolist()
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


@eqx.filter_jit
def _sums(model: CachedModel, example: LmExample, chunk_size: int):
    """(loss, weight, steps, tokens), summed over a batch; reads `chunk_size` positions at a time."""
    tokens = example.tokens.rearrange((BATCH, POSITION)).array
    weight = example.loss_weight.rearrange((BATCH, POSITION)).array
    rows, length = tokens.shape
    Batch, New = Axis(BATCH, rows), Axis(POSITION, chunk_size)
    given = Inputs.of_example(example)
    pad = [(0, 0), (0, -length % chunk_size)]
    targets, weight = jnp.pad(jnp.roll(tokens, -1, axis=1), pad), jnp.pad(weight, pad)
    tokens = jnp.pad(tokens, pad)
    control = None
    if given.control is not None:
        control = given.control.broadcast_axis((Batch, Axis(POSITION, length))).rearrange((BATCH, POSITION, ...))
        control = jnp.pad(control.array, [*pad, (0, 0)]), control.axes[-1]

    def chunk(carry, at):
        memory, loss = carry

        def piece(a):
            return jax.lax.dynamic_slice_in_dim(a, at, chunk_size, axis=1)

        window = Window(hax.full(Batch, at), hax.full(Batch, jnp.minimum(chunk_size, length - at)))
        own = None if control is None else hax.named(piece(control[0]), (Batch, New, control[1]))
        x, memory = model.extend(hax.named(piece(tokens), (Batch, New)), Inputs(control=own, window=window), memory)
        logits = model.logits(x).rearrange((BATCH, POSITION, "vocab")).array
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), piece(targets)[..., None], axis=-1)[..., 0]
        return (memory, loss - jnp.sum(log_p * piece(weight))), None

    start = (model.memory(Batch, tokens.shape[1]), jnp.float32(0))
    (memory, loss), _ = jax.lax.scan(chunk, start, jnp.arange(0, tokens.shape[1], chunk_size, dtype=jnp.int32))
    # Sequences that pad the last batch have weight zero.
    real = jnp.any(weight > 0, axis=1)[:, None]
    spent = memory[1].spent if isinstance(memory[1], ExitMemory) else jnp.zeros((rows, 2))
    steps, count = jnp.sum(jnp.where(real, spent, 0), axis=0)
    return loss, jnp.sum(weight), steps.astype(jnp.float32), count.astype(jnp.float32)
