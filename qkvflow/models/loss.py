"""The next-token loss with Levanter's blockwise vocabulary, where devices divide the positions."""

import contextlib
from collections.abc import Iterator

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import current_thread_local_mapping, physical_axis_size
from levanter.models.loss import maybe_fused_next_token_loss

from qkvflow.axes import HEADS, POSITION


def next_token_loss(
    Pos: Axis, Embed: Axis, Vocab: Axis, x: NamedArray, head: NamedArray, tokens: NamedArray, **options
) -> NamedArray:
    """Levanter's loss, with its options, of what the head makes of x.

    Differs from Levanter: devices that divide the heads of attention among them all hold all of x. There each would
    compute the whole head, a fifth of the work of a small model; here each takes a part of the positions. The mean is
    `weighted_mean`. And `dtype` holds; there the dtype of the weights takes its place.
    """
    weights, dtype = options.get("loss_weight"), options.get("dtype")
    if weights is not None and dtype is not None:
        options["loss_weight"] = weights.astype(dtype)
    is_mean = options.get("reduction", hax.mean) is hax.mean and options.get("reduction_axis") is None
    if is_mean:
        options |= {"reduction": None, "reduction_axis": ()}
    x = hax.auto_sharded(x)  # as in the layers: what follows must not change how those are divided
    with _positions_divided(x.resolve_axis(POSITION)):
        loss = maybe_fused_next_token_loss(Pos, Embed, Vocab, hax.auto_sharded(x), head, tokens, **options)
    return weighted_mean(loss, weights) if is_mean else loss


def weighted_mean(losses: NamedArray, weights: NamedArray | None) -> NamedArray:
    """sum(losses) / sum(weights) over the tokens that predict another one; without weights each has the weight 1.

    Differs from Levanter: the mean of no token is 0 with a gradient of 0; there the gradient is NaN. And both sums are
    one, so that the sum of the weights, too, waits for the losses. Several processes on CPUs run sums that do not
    depend on the loop over depth in any order beside those in it, and two that choose differently wait for ever.

    Args:
        losses: times the weights, {batch, position}.
        weights: {batch, position}; the last position predicts nothing.
    """
    weights = hax.ones_like(losses, jnp.float32) if weights is None else weights
    weights = weights * (hax.arange(losses.resolve_axis(POSITION)) < losses.axis_size(POSITION) - 1)
    sums = hax.sum(hax.stack("sum", [losses, weights.broadcast_to(losses.axes)]), axis=losses.axes)
    loss, count = sums.unbind("sum")
    return loss / hax.where(count > 0, count, hax.ones_like(count))


def counted(weights: NamedArray) -> tuple[NamedArray, NamedArray]:
    """Weights that Levanter can divide by, and whether any token counts: multiply the loss by it.

    The weights are 1 where no token counts. There Levanter's mean is 0, but its gradient NaN.
    """
    some = hax.any(weights[POSITION, :-1] > 0)  # the last position predicts nothing
    return hax.where(some, weights, hax.ones_like(weights)), some


def mean_weight(weights: NamedArray) -> jax.Array:
    """The mean over the tokens that predict another one: all but the last of each sequence.

    Args:
        weights: {batch, position}.
    """
    return hax.mean(weights[POSITION, :-1]).scalar()


def part_of(loss: jax.Array | NamedArray, weights: NamedArray, whole: jax.Array) -> jax.Array | NamedArray:
    """The mean loss of a part of a batch, weighted so that the mean over equally large parts is that of the batch.

    loss * mean weight of the part / mean weight of the batch; exactly the loss where all tokens have the same weight.
    Differs from Levanter, where each part counts the same, however many of its tokens count.

    Args:
        weights: of the part's tokens, {batch, position}.
        whole: `mean_weight` of the batch.
    """
    share = mean_weight(weights) / jnp.where(whole > 0, whole, 1.0)
    return loss * share


@contextlib.contextmanager
def _positions_divided(Pos: Axis) -> Iterator[None]:
    """Positions are mapped as heads are, if they are not mapped yet, and the devices divide them."""
    mapping = dict(current_thread_local_mapping() or {})
    over = mapping.get(HEADS)
    if over is None or POSITION in mapping or Pos.size % (physical_axis_size(HEADS, mapping) or 1):
        yield
        return
    with hax.axis_mapping(mapping | {POSITION: over}):
        yield
