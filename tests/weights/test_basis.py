"""Basis weights: the bases themselves, W(t) by hand, its rate, refinement, and what they are special cases of."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.interpolate import BSpline
from support.models import VOCAB, WEIGHTS, build, llama, random_tokens, small_config

from qkvflow.blocks import Gpt2BlockConfig, SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import Notice, UserError
from qkvflow.models import ControlConfig
from qkvflow.named import is_named
from qkvflow.time import grid
from qkvflow.weights import BasisConfig, FunctionBasis, Galerkin, at, rate, refine, refine_with_error, roughness
from qkvflow.weights.bases import BASES

T = np.linspace(0.0, 1.0, 41)
SMOOTH = [name for name in BASES if name != "piecewise"]


def leaves(module):
    return [x.array for x in jax.tree.leaves(module, is_leaf=is_named) if is_named(x)]


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", BASES)
def test_values_and_derivatives(name, dim):
    """The constant is in every space; jnp equals NumPy; derivatives are those of autodiff, between the corners."""
    basis = FunctionBasis(name, dim)
    values = basis.values(T)
    assert values.shape == (41, dim)
    np.testing.assert_allclose(values @ basis.constant, 1, atol=1e-12)
    np.testing.assert_allclose(
        jax.vmap(lambda t: basis.values(t, jnp))(jnp.asarray(T, jnp.float32)), values, atol=1e-5 * dim
    )
    inside = jnp.asarray(np.linspace(0.013, 0.987, 23), jnp.float32)
    slopes = jax.vmap(jax.jacfwd(lambda t: basis.values(t, jnp)))(inside)
    scale = max(1.0, float(jnp.abs(slopes).max()))
    found = jax.vmap(lambda t: basis.derivatives(t, jnp))(inside)
    np.testing.assert_allclose(found / scale, slopes / scale, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "spline"])
def test_a_rounding_error_beyond_an_end_is_the_end(name):
    """Sums of steps come there, such as nine times 1/9."""
    basis = FunctionBasis(name, 4)
    ends = np.array([0.0, 1.0])
    beyond = np.array([-1e-17, np.cumsum([1 / 9] * 9)[-1]])
    assert beyond[1] > 1.0
    for function in (basis.values, basis.derivatives):
        np.testing.assert_array_equal(np.asarray(function(beyond)), np.asarray(function(ends)))


def test_splines_are_scipys():
    basis = FunctionBasis("spline", 7)
    knots = np.concatenate([np.zeros(3), np.linspace(0, 1, 5), np.ones(3)])
    np.testing.assert_allclose(basis.values(T), BSpline.design_matrix(T, knots, 3).toarray(), atol=1e-12)


def test_pieces_at_their_boundaries():
    """Right end points of K Euler steps fall into K pieces, left ones too if they are left-closed; also where
    (k+1)/K * K is no whole number in floating point."""
    for dim in (3, 6, 93, 300, 512):
        right = [(k + 1) / dim for k in range(dim)]
        left = [k / dim for k in range(dim)]
        for dtype in (np.float64, np.float32):
            np.testing.assert_array_equal(FunctionBasis("piecewise", dim).values(np.asarray(right, dtype)), np.eye(dim))
            other = FunctionBasis("piecewise", dim, right_closed=False)
            np.testing.assert_array_equal(other.values(np.asarray(left, dtype)), np.eye(dim))


@pytest.mark.parametrize("dim", [6, 11, 23])
def test_corners_are_exactly_at_their_nodes(dim):
    """Where a derivative jumps, it is that from the right."""
    nodes = np.array([k / (dim - 1) for k in range(dim - 1)])
    expected = (dim - 1.0) * (np.eye(dim)[1:] - np.eye(dim)[:-1])
    np.testing.assert_allclose(FunctionBasis("linear", dim).derivatives(nodes), expected, rtol=1e-12)


@pytest.mark.parametrize("adjoint", ["checkpoint", "backsolve"])
def test_pieces_of_left_end_points_are_left_closed_whatever_the_adjoint(adjoint):
    depth = DepthConfig(steps=3, endpoint="left", adjoint=adjoint)
    config = small_config(BasisConfig("piecewise", 3, "independent"), depth=depth)
    first, second = (leaves(at(build(config).transformer.flow.weights, k / 3)) for k in (0, 1))
    assert any(np.abs(a - b).max() > 0.01 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", BASES)
def test_gram_matrices_are_exact(name):
    basis, fine = FunctionBasis(name, 6), np.linspace(0, 1, 200_001)
    middle = (fine[1:] + fine[:-1]) / 2
    for derivative in (False, True):
        values = (basis.derivatives if derivative else basis.values)(middle)
        expected = values.T @ values / len(middle)
        np.testing.assert_allclose(
            basis.gram(derivative=derivative), expected, atol=1e-5 * max(1, np.abs(expected).max())
        )


@pytest.mark.parametrize("name", ["linear", "spline"])
def test_gram_matrices_of_many_functions_are_exact_too(name):
    """The sums of those of the functions are those of the constant: 1 for the values, 0 for the derivatives."""
    basis = FunctionBasis(name, 400)
    assert basis.gram().sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(basis.gram(derivative=True).sum(axis=1), 0, atol=1e-9)
    assert basis.gram() is FunctionBasis(name, 400).gram()


def _coefficients(unit):
    return unit.coefficients if isinstance(unit, Galerkin) else unit


def model_of(name="chebyshev", dim=4, **kwargs):
    return build(small_config(BasisConfig(basis=name, dim=dim), **kwargs))


def test_by_hand():
    """W(t) = sum_k phi_k(t) C_k for every array, norms and biases included; on a grid, at a point, traced."""
    weights = model_of("cosine", 3).transformer.flow.weights
    at_grid = leaves(at(weights, grid([0.25, 1.0])))
    coefficients = [c for unit in (weights.attn_ln, weights.attn.c_attn) for c in leaves(unit.coefficients)]
    assert {c.shape[0] for c in coefficients} == {3}
    for t, row in ((0.25, 0), (1.0, 1)):
        phi = np.cos(np.pi * np.arange(3) * t)
        expected = [np.tensordot(phi, np.asarray(c), 1) for c in leaves(jax.tree.map(lambda x: x, weights))]
        for found in (leaves(at(weights, t)), [a[row] for a in at_grid], leaves(at(weights, jnp.float32(t)))):
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("block", ["gpt2", "llama", "ssm"])
def test_one_function_is_constant_weights(block, tokens):
    """K = 1, on the same draw: the same model."""
    blocks = {"gpt2": {}, "llama": {"block": llama()}, "ssm": {"block": SsmBlockConfig(num_heads=2, state_size=4)}}
    config = small_config("constant", **blocks[block])
    for name in BASES if block == "gpt2" else ["spline"]:
        own = dataclasses.replace(config, weights=BasisConfig(basis=name, dim=1)).build(
            VOCAB, key=jax.random.PRNGKey(0)
        )
        one = at(own.transformer.flow.weights, 0.3)
        constant = eqx.tree_at(
            lambda m: m.transformer.flow.weights, config.build(VOCAB, key=jax.random.PRNGKey(0)), one
        )
        run = eqx.filter_jit(lambda m: m(tokens).array)
        np.testing.assert_allclose(run(own), run(constant), atol=1e-6)


@pytest.mark.parametrize("endpoint", ["right", "left"])
def test_as_many_pieces_as_steps_are_ordinary_layers(endpoint, tokens):
    depth = DepthConfig(steps=3, endpoint=endpoint)
    pieces = model_of("piecewise", 3, depth=depth)
    layers = small_config("per_layer", depth=depth).build(VOCAB, key=jax.random.PRNGKey(0))
    arrays = leaves(pieces.transformer.flow.weights)
    units = jax.tree.map(_coefficients, pieces.transformer.flow.weights, is_leaf=lambda m: isinstance(m, Galerkin))
    stack = jax.tree.map(lambda a: a.rename({"basis": "layers"}) if is_named(a) else a, units, is_leaf=is_named)
    own = lambda m: leaves(m.transformer.flow.blocks.stacked)  # noqa: E731
    assert [a.shape for a in own(layers)] == [a.shape for a in arrays]
    flow = dataclasses.replace(
        layers.transformer.flow,
        weights=dataclasses.replace(
            layers.transformer.flow.weights,
            blocks=dataclasses.replace(layers.transformer.flow.blocks, stacked=stack),
        ),
    )
    layers = dataclasses.replace(pieces, transformer=dataclasses.replace(pieces.transformer, flow=flow))
    run = eqx.filter_jit(lambda m: m(tokens).array)
    np.testing.assert_allclose(run(pieces), run(layers), atol=1e-6)


@pytest.mark.parametrize(("init", "common"), [("matched", 0.9), ("independent", 0.0)])
def test_pieces_start_as_layers_of_the_ordinary_scale(init, common):
    """Their correlation is the share of the variance that they have in common."""
    config = small_config(BasisConfig("piecewise", 3, init), block=Gpt2BlockConfig(num_heads=2))
    attn = config.build(VOCAB, key=jax.random.PRNGKey(0)).transformer.flow.weights.attn
    rows = np.concatenate([np.asarray(c).reshape(3, -1) for c in leaves((attn.c_attn, attn.c_proj)) if c.ndim > 3], 1)
    ordinary = Gpt2BlockConfig(num_heads=2).init(config.Embed, key=jax.random.PRNGKey(1)).attn
    scale = np.std(np.concatenate([w.weight.array.ravel() for w in (ordinary.c_attn, ordinary.c_proj)]))
    # 1024 numbers: the error of a correlation is 0.03, that of a deviation 2 %; here three of each.
    np.testing.assert_allclose(np.corrcoef(rows), np.where(np.eye(3), 1.0, common), atol=0.1)
    np.testing.assert_allclose(rows.std(axis=1), scale, rtol=0.1)


KINDS = {
    **{name: BasisConfig(basis=name, dim=5) for name in SMOOTH},
    "generated": WEIGHTS["generated"],
    "modulated": dataclasses.replace(WEIGHTS["modulated"], time_scale=3.0),
}


@pytest.mark.parametrize("kind", [*KINDS, "control", "constant"])
def test_rate_is_the_derivative(kind):
    """dW/dt in closed form equals autodiff of `at` through a traced time, in float64; along a grid too."""
    if kind == "control":
        config = small_config(BasisConfig(dim=3), control=ControlConfig(dim=2))
    else:
        config = small_config(KINDS.get(kind, kind))
    weights = build(config).transformer.flow.weights
    with jax.enable_x64(True):
        weights = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, weights)
        t, rng = 0.37, np.random.default_rng(0)  # between the corners of `linear`
        directions = [rng.standard_normal(a.shape) for a in leaves(rate(weights, t))]

        def along(arrays):
            return sum(jnp.sum(d * a) for d, a in zip(directions, arrays, strict=True))

        by_autodiff = float(jax.grad(lambda t: along(leaves(at(weights, t))))(jnp.asarray(t)))
        assert kind == "constant" or abs(by_autodiff) > 1e-3
        assert float(along(leaves(rate(weights, t)))) == pytest.approx(by_autodiff, rel=1e-9)
        on_grid = [a[1] for a in leaves(rate(weights, grid([0.1, t])))]
        assert float(along(on_grid)) == pytest.approx(by_autodiff, rel=1e-9)


@pytest.mark.parametrize("t", [0.0, 1.0])
@pytest.mark.parametrize("name", ["chebyshev", "cosine", "linear", "spline"])
def test_derivatives_at_the_ends_are_those_of_autodiff(name, t):
    """Not half of them, as where a time is clipped. In float64."""
    basis = FunctionBasis(name, 6)
    with jax.enable_x64(True):
        for differentiate in (jax.jacfwd, jax.jacrev):
            found = differentiate(lambda t: basis.values(t, jnp))(jnp.asarray(t))
            np.testing.assert_allclose(found, basis.derivatives(np.asarray(t)), rtol=1e-12, atol=1e-12)


def test_rate_of_ordinary_layers_is_refused():
    with pytest.raises(UserError, match="not functions of time"):
        rate(build(small_config("per_layer")).transformer.flow.weights, 1.0)


@pytest.mark.parametrize(
    ("name", "dim", "fine"),
    [("chebyshev", 3, 7), ("cosine", 3, 4), ("linear", 4, 7), ("linear", 1, 3), ("piecewise", 3, 6), ("spline", 5, 7)],
)
def test_refined_weights_are_the_same_where_spaces_are_nested(name, dim, fine):
    weights = model_of(name, dim).transformer.flow.weights
    finer, error = refine_with_error(weights, fine)
    assert error == 0
    for t in (0.0, 0.21, 0.5, 0.93, 1.0):
        for a, b in zip(leaves(at(weights, t)), leaves(at(finer, t)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_refined_weights_are_the_nearest_otherwise():
    """Least squares over t: no other coefficients are nearer, and the error is told."""
    weights = model_of("linear", 4).transformer.flow.weights
    finer, error = refine_with_error(weights, 6)
    assert 0.01 < error < 0.2
    times = np.linspace(0, 1, 2001)
    old, new = (np.asarray(at(w.mlp.c_fc, grid(times)).weight.array, np.float64) for w in (weights, finer))
    best = np.linalg.lstsq(FunctionBasis("linear", 6).values(times), old.reshape(len(times), -1), rcond=None)[0]
    by_hand = (FunctionBasis("linear", 6).values(times) @ best).reshape(old.shape)
    assert np.sqrt(np.mean((new - old) ** 2)) == pytest.approx(np.sqrt(np.mean((by_hand - old) ** 2)), rel=1e-3)
    with pytest.warns(Notice, match=f"linear with 6 functions cannot represent.* up to {error:.1e} "):
        refine(weights, 6)
    with pytest.raises(UserError, match="fewer"):
        refine(weights, 3)
    with pytest.raises(UserError, match="fewer"):
        FunctionBasis("chebyshev", 6).refinement(3)
    with pytest.raises(UserError, match="basis weights"):
        refine(build(small_config("generated")), 8)


@pytest.mark.parametrize("name", BASES)
def test_initial_scale(name):
    """At all times the standard deviation of the ordinary layer, within 4 % (of the variance a tenth varies in time,
    and its share moves about its mean by 0.5), and W(t) does move."""
    config = small_config(BasisConfig(basis=name, dim=6))
    config = dataclasses.replace(config, hidden_dim=256, block=dataclasses.replace(config.block, num_heads=4))
    weights = config.build(VOCAB, key=jax.random.PRNGKey(0)).transformer.flow.weights
    ordinary = config.block.init(config.Embed, key=jax.random.PRNGKey(1))
    w = np.asarray(at(weights, grid(np.linspace(0, 1, 33))).mlp.c_fc.weight.array)
    expected = float(hax.std(ordinary.mlp.c_fc.weight).array)
    np.testing.assert_allclose(w.std(axis=(1, 2)), expected, rtol=0.04)
    assert np.abs(w[0] - w[-1]).std() > 0.1 * expected
    gain = at(weights, 0.5).attn_ln.weight.array
    np.testing.assert_allclose(gain, 1, atol=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_roughness(name):
    weights = model_of(name, 5).transformer.flow.weights
    t = (np.arange(4000) + 0.5) / 4000
    expected = sum(float(jnp.sum(jnp.square(r))) / len(t) for r in leaves(rate(weights, grid(t))))
    assert float(jax.jit(roughness)(weights)) == pytest.approx(expected, rel=1e-4)


def test_refusals():
    for wrong, match in (
        ({"dim": 0}, "at least 1"),
        ({"basis": "fourier"}, "Choices"),
        ({"init": "official"}, "matched"),
        ({"smoothness_weight": -1.0}, "at least 0"),
        ({"basis": "piecewise", "smoothness_weight": 1.0}, "jump"),
        ({"dim": 2, "init": "independent"}, "zero at t = 1/2"),
        ({"dim": 513}, "at most 512"),
        *(({"dim": dim}, "must be a whole number") for dim in (2.5, "4", True, None)),
    ):
        with pytest.raises(UserError, match=match):
            BasisConfig(**wrong)
    for dim in (4.0, "5", 0):
        with pytest.raises(UserError, match="a whole number of functions, at least 1"):
            refine(model_of("linear").transformer.flow.weights, dim)
    with pytest.raises(UserError, match="Choices"):
        FunctionBasis("fourier", 3)
    assert type(FunctionBasis("cosine", np.int64(3)).dim) is int
    with pytest.raises(UserError, match="jump"):
        roughness(model_of("piecewise").transformer.flow.weights)


def test_random_tokens_are_read_at_any_depth():
    """A flow of smooth weights converges with the number of steps."""
    model, tokens = model_of("chebyshev", 3), random_tokens()
    logits = [model.with_depth(DepthConfig(steps=n))(tokens).array for n in (8, 16, 32)]
    assert np.abs(logits[2] - logits[1]).max() < 0.7 * np.abs(logits[1] - logits[0]).max()
