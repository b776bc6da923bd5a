"""The blockwise loss over the vocabulary, as used in training, equals the loss of all logits; so do its gradients.

Tolerances are relative to the largest value. fp32: sums in a different order. bf16: inputs are exact and logits
are fp32 in both; only gradients are rounded, to 2^-9 for each of four blocks of the vocabulary, 4 * 2^-9 = 0.008.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.models.loss import next_token_loss as plain_loss

from qkvflow.models.loss import counted, next_token_loss

Batch, Pos, Embed = Axis("batch", 2), Axis("position", 24), Axis("embed", 48)
Vocab = Axis("vocab", 500)  # no multiple of a block
Z = 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.01)])
@pytest.mark.parametrize("block_size", [None, 128])
def test_blocks_of_the_vocabulary_change_nothing(dtype, tolerance, block_size):
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    x = hax.random.normal(keys[0], (Batch, Pos, Embed)).astype(dtype)
    head = (0.3 * hax.random.normal(keys[1], (Embed, Vocab))).astype(dtype)
    tokens = hax.random.randint(keys[2], (Batch, Pos), 0, Vocab.size)
    weight = (hax.random.uniform(keys[3], (Batch, Pos)) < 0.7).astype(jnp.float32)
    options = dict(loss_weight=weight, logsumexp_weight=Z)

    def by_blocks(xs):
        return next_token_loss(Pos, Embed, Vocab, *xs, tokens, block_size=block_size, **options).scalar()

    def whole(xs):
        x, head = xs
        return plain_loss(Pos, Vocab, hax.dot(x, head, axis=Embed), tokens, **options).scalar()

    exact = (x.astype(jnp.float32), head.astype(jnp.float32))
    found = jax.tree.leaves(eqx.filter_jit(eqx.filter_value_and_grad(by_blocks))((x, head)))
    expected = jax.tree.leaves(eqx.filter_jit(eqx.filter_value_and_grad(whole))(exact))
    assert found[0].dtype == jnp.float32
    assert {a.dtype for a in found[1:]} == {jnp.dtype(dtype)}
    assert abs(found[0] - expected[0]) < 1e-5 * expected[0]
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs)
        assert np.abs(ours - theirs).max() < tolerance * np.abs(theirs).max()
    # The weights and the penalty are no small matter.
    for without in ({"loss_weight": None}, {"logsumexp_weight": None}):
        other = plain_loss(Pos, Vocab, hax.dot(*exact, axis=Embed), tokens, **options | without).scalar()
        assert abs(other - expected[0]) > 1e-3 * expected[0]


def test_no_token_has_no_loss_and_no_gradient():
    """As a part of a batch in which no token counts; Levanter's gradient is NaN there."""
    x = hax.random.normal(jax.random.PRNGKey(0), (Batch, Pos, Embed))
    head = hax.random.normal(jax.random.PRNGKey(1), (Embed, Vocab))
    tokens = hax.zeros((Batch, Pos), jnp.int32)

    def loss(xs, weight):
        return next_token_loss(Pos, Embed, Vocab, *xs, tokens, loss_weight=weight).scalar()

    nothing = hax.zeros((Batch, Pos))
    last = nothing.at[Pos, -1].set(1.0)  # it predicts nothing
    for weight in (nothing, last):
        found = jax.tree.leaves(eqx.filter_value_and_grad(loss)((x, head), weight))
        assert all((np.asarray(leaf) == 0).all() for leaf in found)
    one = nothing.at[Pos, 3].set(1.0)
    expected = plain_loss(Pos, Vocab, hax.dot(x, head, axis=Embed), tokens, loss_weight=one).scalar()
    assert loss((x, head), one) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_weights_of_every_precision(wide, dtype):
    """None: without weights. With 64 bits, a number in Python is wider than the weights."""
    with jax.enable_x64(wide):
        keys = jax.random.split(jax.random.PRNGKey(0), 3)
        x = hax.random.normal(keys[0], (Batch, Pos, Embed), jnp.float32)
        head = hax.random.normal(keys[1], (Embed, Vocab), jnp.float32)
        tokens = hax.random.randint(keys[2], (Batch, Pos), 0, Vocab.size)
        weight = None if dtype is None else hax.ones((Batch, Pos), dtype)
        expected = plain_loss(Pos, Vocab, hax.dot(x, head, axis=Embed), tokens).scalar()
        for options, tolerance in (({}, 1e-5), ({"dtype": jnp.float32}, 1e-5), ({"dtype": jnp.bfloat16}, 0.01)):
            if dtype is not None and not options:
                continue  # then the weights say how precise it is
            found = next_token_loss(Pos, Embed, Vocab, x, head, tokens, loss_weight=weight, **options).scalar()
            assert float(found) == pytest.approx(float(expected), rel=tolerance)
        if dtype is not None:
            assert counted(weight)[0].dtype == dtype
