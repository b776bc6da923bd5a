"""`Program` does what `haliax.named_jit` does."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from jax.sharding import Mesh

from qkvflow.inside.haliax import Program

MAPPING = {"embed": "data"}
Embed, Out = hax.Axis("embed", 4), hax.Axis("out", 3)


class Net(eqx.Module):
    weight: NamedArray
    plain: jax.Array
    rate: float
    activation: object
    nothing: None = None


def net(rate: float = 0.5) -> Net:
    weight = hax.random.normal(jax.random.PRNGKey(0), (Embed, Out))
    return Net(weight, jnp.arange(3.0), rate, jnp.tanh)


def step(net: Net, x: NamedArray, options: dict) -> tuple[Net, NamedArray, dict]:
    y = hax.dot(x, net.weight, axis=Embed) * options["scale"] * net.rate
    moved = eqx.tree_at(lambda n: (n.weight, n.plain), net, (net.weight + x, net.activation(net.plain)))
    return moved, y, {"sum": hax.sum(y).scalar(), "rate": net.rate}


X = hax.named(jnp.linspace(0.0, 1.0, 4), "embed")


@pytest.fixture(autouse=True)
def mesh():
    with Mesh(np.array(jax.devices()[:1]), ("data",)):
        yield


def test_results_and_their_structure_are_those_of_named_jit():
    given = X, {"scale": 2.0}
    named = hax.named_jit(step, axis_resources=MAPPING, out_axis_resources=MAPPING, donate_args=(True,))
    ours, theirs = Program(step, MAPPING)(net(), *given), named(net(), *given)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(one) is type(other)
        if eqx.is_array(one):
            np.testing.assert_array_equal(one, other)
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        else:
            assert one == other


def test_the_state_alone_is_donated():
    state = net()
    Program(step, MAPPING)(state, X, {"scale": 2.0})
    assert state.weight.array.is_deleted()
    assert state.plain.is_deleted()
    assert not X.array.is_deleted()


def test_other_parts_that_are_not_arrays_are_compiled_again():
    traced = []
    program = Program(lambda *args: (traced.append(1), step(*args))[1], MAPPING)
    sums = [
        float(program(net(rate), X, {"scale": scale})[2]["sum"]) for rate, scale in [(0.5, 2.0), (1.0, 2.0), (0.5, 4.0)]
    ]
    assert sums[1] == sums[2] == 2 * sums[0] != 0
    assert len(traced) == 3
    program(net(0.5), X, {"scale": 2.0})
    assert len(traced) == 3, "each structure is traced once"


def test_shapes_compile_to_the_program_of_arrays():
    program, scale = Program(step, MAPPING), {"scale": 2.0}
    shapes = eqx.filter_eval_shape(lambda: (net(), X))
    ahead, real = program.lower(*shapes, scale).compile(), program.lower(net(), X, scale).compile()
    assert ahead.as_text() == real.as_text()
    named = hax.named_jit(step, axis_resources=MAPPING, out_axis_resources=MAPPING, donate_args=(True,))
    memory = named.lower(net(), X, scale).compile().memory_analysis()
    assert ahead.memory_analysis().alias_size_in_bytes == memory.alias_size_in_bytes > 0
