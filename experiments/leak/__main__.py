"""Demonstrates the fork's leak in a minute: its attention sees the future, so its losses are meaningless.

    python -m experiments.leak [--steps 400] [--seed 0] [--output DIR]
    python -m experiments.leak --redraw [--output DIR]    (the page, from the JSON)

On fresh uniform random tokens no causal model can get below log(vocab), because the next token is unpredictable. A
model whose attention uses one name for the query and key axes gets far below it, since it pools over the tokens that it
is to predict. The page then compares the fork's published statistics with those recomputed from its own losses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from haliax.nn.attention import causal_mask

from experiments.config import OutputConfig
from experiments.leak.model import Model
from experiments.leak.published import Published, claim_table, loss_table, published
from experiments.measure import moved
from experiments.records import Record
from experiments.study import Study
from experiments.tables import Table
from qkvflow.ranges import Count

Vocab, Batch, Pos = Axis("vocab", 32), Axis("batch", 64), Axis("position", 8)


@dataclass
class LeakConfig(OutputConfig):
    """In addition to `OutputConfig`: steps: training steps of each of the two models. seed: of everything."""

    steps: Count = 400
    seed: int = 0


@dataclass(kw_only=True)
class LeakProtocol(LeakConfig):
    """Sizes of the axes; tested: number of sequences for the final loss."""

    vocab: int = Vocab.size
    batch: int = Batch.size
    position: int = Pos.size
    tested: int = 2048


@dataclass(frozen=True)
class Mask:
    """The result of Haliax's `causal_mask` for one name."""

    axes: list[str]
    is_all_true: bool


@dataclass(frozen=True)
class Shown:
    """
    Attributes:
        moved: the largest change of a logit before a changed token.
        loss: nats per token on fresh random tokens after training.
        error: standard error of that loss, over sequences.
    """

    moved: float
    loss: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Leak(Record):
    """models: name -> its behaviour."""

    protocol: LeakProtocol
    mask: Mask
    models: dict[str, Shown]
    published: Published


def make(config: LeakConfig, run_dir: Path) -> Leak:
    mask = causal_mask(Pos, Pos)
    names = {"one name for both axes": True, "two names (causal)": False}
    return Leak(
        protocol=LeakProtocol(**config.rules()),
        mask=Mask([a.name for a in mask.axes], bool(hax.all(mask))),
        models={name: demonstrate(leaks, config.steps, config.seed) for name, leaks in names.items()},
        published=published(),
    )


def page(record: Leak) -> Mapping[str, object]:
    rows = [[name, f"{m.loss:.3f} ± {1.96 * m.error:.3f}", f"{m.moved:.3g}"] for name, m in record.models.items()]
    head = ["axes of queries and keys", "loss", "largest change of an earlier logit when a token is changed"]
    return {
        "kind": "all true" if record.mask.is_all_true else "not all true",
        "bound": math.log(record.protocol.vocab),
        "models": Table(head, rows),
        "losses": loss_table(record.published),
        "claims": claim_table(record.published),
    }


def demonstrate(leaks: bool, steps: int, seed: int) -> Shown:
    """Trains one model on random tokens drawn anew for each step, and measures it."""
    model_key, data_key, test_key = jax.random.split(jax.random.PRNGKey(seed), 3)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    model = Model.init(Vocab, leaks=leaks, key=model_key)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def step(carry, key):
        arrays, state = carry
        loss_of = eqx.filter_value_and_grad(lambda arrays: losses(eqx.combine(arrays, static), draw(key)).mean())
        loss, gradient = loss_of(arrays)
        updates, state = optimizer.update(gradient, state)
        return (eqx.apply_updates(arrays, updates), state), loss

    arrays, static = eqx.partition(model, eqx.is_array)
    train = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    (arrays, _), _ = train((arrays, state), jax.random.split(data_key, steps))
    model = eqx.combine(arrays, static)
    each = eqx.filter_jit(losses)(model, draw(test_key, LeakProtocol.tested))
    before, _ = moved(model, draw(test_key), Pos.size // 2)
    return Shown(before, float(each.mean()), float(each.std() / math.sqrt(LeakProtocol.tested)))


def draw(key: jax.Array, sequences: int = Batch.size) -> NamedArray:
    """Uniform random tokens {batch, position}."""
    return hax.random.randint(key, (Batch.resize(sequences), Pos), 0, Vocab.size)


def losses(model: Model, tokens: NamedArray) -> jax.Array:
    """Next-token loss of each sequence, {batch}."""
    logits = jax.nn.log_softmax(model(tokens).rearrange(("batch", "position", "vocab")).array[:, :-1])
    return -jnp.take_along_axis(logits, tokens.array[:, 1:, None], -1)[..., 0].mean(1)


STUDY = Study("leak", LeakConfig, Leak, make, page)

if __name__ == "__main__":
    STUDY.program()
