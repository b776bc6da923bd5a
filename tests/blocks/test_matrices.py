"""Linear maps by rows: the same values and gradients, as one product of matrices."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import pytest
from haliax.partitioning import axis_mapping, set_mesh

from qkvflow.blocks.matrices import by_rows

Batch, Pos, Embed, Mlp = hax.make_axes(batch=3, position=5, embed=4, mlp=7)


@pytest.fixture(scope="module")
def linear() -> hnn.Linear:
    return hnn.Linear.init(Embed, Mlp, key=jax.random.PRNGKey(0), out_first=False)


def ranks(linear: hnn.Linear, x: hax.NamedArray) -> list[int]:
    """Of the rows that the products of the forward pass read."""
    jaxpr = jax.make_jaxpr(lambda array: by_rows(linear, hax.named(array, x.axes)).array)(x.array)
    return [eqn.invars[0].aval.ndim for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("axes", [(Embed,), (Pos, Embed), (Batch, Pos, Embed)], ids=str)
def test_values_and_gradients_are_those_of_the_map(linear, axes):
    x = hax.random.normal(jax.random.PRNGKey(1), axes)
    rows, plain = by_rows(linear, x), linear(x)
    assert rows.axes == plain.axes == (*axes[:-1], Mlp)
    np.testing.assert_allclose(rows.array, plain.array, atol=1e-6)

    def loss(inputs, call):
        linear, x = inputs
        return hax.sum(call(linear, x) ** 2).scalar()

    found = eqx.filter_grad(loss)((linear, x), by_rows)
    wanted = eqx.filter_grad(loss)((linear, x), lambda linear, x: linear(x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)
    assert ranks(linear, x) == [min(len(axes), 2)]


def test_a_division_of_positions_is_kept(linear):
    x = hax.random.normal(jax.random.PRNGKey(1), (Batch, Pos, Embed))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    with set_mesh(mesh), axis_mapping({"batch": "data"}):
        assert ranks(linear, x) == [2]
    with set_mesh(mesh), axis_mapping({"batch": "data", "position": "model"}):
        assert ranks(linear, x) == [3]
