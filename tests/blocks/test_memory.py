"""Keys of a window are written where their sequence stands, for any number of them, by a program of bounded size."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from qkvflow.axes import BATCH, BATCH_HEADS, POSITION
from qkvflow.blocks.memory import UNROLLED_ROWS, KeysValues, Window

HeadSize, Heads, New = Axis("head_size", 4), Axis("heads", 2), Axis(POSITION, 3)
LENGTH = 16


def case(rows: int):
    """(memory, new keys, where they go), with each array's number i in it once."""
    Batch = Axis(BATCH, rows)
    memory = KeysValues.empty(Batch, Heads, LENGTH, HeadSize, jnp.float32)
    keys = hax.random.normal(jax.random.PRNGKey(rows), (Batch, Heads, New, HeadSize))
    start = hax.named(np.random.default_rng(rows).integers(0, LENGTH - New.size + 1, rows).astype(np.int32), Batch)
    return memory, keys, Window(start, hax.full(Batch, New.size, jnp.int32))


@pytest.mark.parametrize("rows", [1, UNROLLED_ROWS, UNROLLED_ROWS + 1, 2 * UNROLLED_ROWS, 2 * UNROLLED_ROWS + 5])
def test_keys_are_written_where_each_sequence_stands(rows):
    memory, keys, window = case(rows)
    written = jax.jit(lambda memory: memory.extended(keys, -keys, window))(memory)
    expected = np.zeros((rows, Heads.size, LENGTH, HeadSize.size), np.float32)
    for i, start in enumerate(window.start.array):
        expected[i, :, start : start + New.size] = keys.array[i]
    np.testing.assert_array_equal(written.k.array, expected.reshape(memory.k.array.shape))
    np.testing.assert_array_equal(written.v.array, -expected.reshape(memory.k.array.shape))
    assert written.k.axes[0] == Axis(BATCH_HEADS, rows * Heads.size)


def test_the_program_does_not_grow_with_the_sequences():
    def updates(rows: int) -> int:
        memory, keys, window = case(rows)
        return str(jax.make_jaxpr(lambda: memory.extended(keys, keys, window).k.array)()).count("dynamic_update_slice")

    assert updates(64) == updates(1024) <= 2 * UNROLLED_ROWS * 2
