"""Teacher forcing of packed documents: the loss of the model that reads them by segment ids, and of each one alone."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.utils.tree_utils import inference_mode
from support.models import build, is_float, llama, random_tokens, small_config

from qkvflow.axes import BATCH, POSITION
from qkvflow.blocks import Gpt2BlockConfig, SsmBlockConfig
from qkvflow.data.control.sequences import ControlledExample
from qkvflow.depth import DepthConfig
from qkvflow.generation.documents import Documents
from qkvflow.generation.forced import ForcedReader, read_with_cache
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing

LENGTH = 100
BLOCKS = {
    "gpt2": None,
    "llama": llama(),
    "convolution": Gpt2BlockConfig(num_heads=2, mlp_scale=2, convolution=4),
    "recurrence": SsmBlockConfig(num_heads=2, state_size=4),
}


def model_of(block=None):
    changes = {} if block is None else {"block": block}
    config = dataclasses.replace(small_config(depth=DepthConfig(steps=4), **changes), max_seq_len=128)
    return inference_mode(jax.tree.map(lambda a: 2 * a if is_float(a) else a, build(config)), True)


def packed(cuts, seed=0):
    """An example with documents that end at `cuts` of each sequence; a target counts everywhere but at the end."""
    tokens = random_tokens(seed=seed, batch=len(cuts), length=LENGTH)
    ids = np.stack([np.searchsorted(c, np.arange(LENGTH), side="right") for c in cuts])
    weight = hax.ones(tokens.axes).at[POSITION, -1].set(0.0)
    return LmExample(tokens, weight, AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray(ids), tokens.axes)))


EXAMPLES = [packed([[40], [], [3, 4, 70]]), packed([[1, 2, 3, 64, 99], [50], [64]], seed=1)]


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_loss_is_that_of_the_model_without_a_cache(block):
    model = model_of(block)
    expected = np.mean([model.compute_next_token_loss(e).item() for e in EXAMPLES])
    assert read_with_cache(model, EXACT, EXAMPLES).loss == pytest.approx(expected, rel=1e-5)
    one_text = [dataclasses.replace(e, attn_mask=AttentionMask.causal()) for e in EXAMPLES]
    other = np.mean([model.compute_next_token_loss(e).item() for e in one_text])
    assert abs(other - expected) > 1e-4  # the boundaries are no small matter
    assert read_with_cache(model, EXACT, one_text).loss == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("cache", ["every 2", "latest"])
def test_with_a_shared_cache_a_document_is_read_as_alone(cache):
    """Whether it is packed or not: a document at the beginning of a sequence, with the rest of it not counted."""
    model, example = model_of(), packed([[40]] * 3)
    first = dataclasses.replace(
        example, loss_weight=example.loss_weight * (hax.arange(example.tokens.resolve_axis(POSITION)) < 40)
    )
    alone = dataclasses.replace(first, attn_mask=AttentionMask.causal())
    readings = [read_with_cache(model, CacheSharing.of(cache), [e]) for e in (first, alone)]
    assert readings[0].loss == pytest.approx(readings[1].loss, rel=1e-6)


def test_exits_count_the_tokens_of_documents():
    model = model_of()
    reader = ForcedReader(model, ExitConfig("velocity", 0.0))
    full, first = (reader.read(EXAMPLES, threshold) for threshold in (0.0, 1e9))
    expected = np.mean([model.compute_next_token_loss(e).item() for e in EXAMPLES])
    assert full.loss == pytest.approx(expected, rel=1e-5)
    assert (full.evaluations, first.evaluations, full.of) == (4, 1, 4)


def test_documents():
    """Each token whose document has a target that counts, once, at its place; the longest documents first."""
    example = packed([[40], [], [3, 4, 70]])
    weight = example.loss_weight.array.at[2, :4].set(0.0)
    example = dataclasses.replace(example, loss_weight=hax.named(weight, example.loss_weight.axes))
    batches = list(Documents.of([example]))
    assert [b.count.tolist() for b in batches] == [[100, 66, 60], [40, 30, 0]]
    assert [b.first.tolist() for b in batches] == [[0, 4, 40], [0, 70, 0]]
    tokens = np.asarray(example.tokens.array)
    np.testing.assert_array_equal(batches[0].tokens[1, :66], tokens[2, 4:70])
    np.testing.assert_array_equal(batches[0].targets[1, :66], tokens[2, 5:71])
    assert sum(float(b.weight.sum()) for b in batches) == float(weight.sum())
    assert all((b.weight[i, n:] == 0).all() for b in batches for i, n in enumerate(b.count))


def test_control_follows_its_document():
    example = packed([[40], [], [3, 4, 70]])
    Control = hax.Axis("control", 2)
    control = hax.random.normal(jax.random.PRNGKey(0), (*example.tokens.axes, Control))
    given = ControlledExample(example.tokens, example.loss_weight, example.attn_mask, control)
    rows = next(iter(Documents.of([given])))
    assert rows.control is not None
    np.testing.assert_array_equal(rows.control[1, :66], control.rearrange((BATCH, POSITION, ...)).array[2, 4:70])
