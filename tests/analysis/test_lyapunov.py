"""Laws of Lyapunov exponents: parity with the official code, known linear flows, volume, convergence, causality."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from support.golden import golden
from support.models import build, llama, random_tokens, small_config

from qkvflow.analysis import lyapunov, trajectory
from qkvflow.analysis.corpus import mean_interval
from qkvflow.analysis.reading import read
from qkvflow.analysis.tangent import Tangent
from qkvflow.blocks import Inputs, SsmBlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig

WIDTH, LENGTH = 16, 3


class Linear(eqx.Module):
    """dx/dt = x A, for each token by itself. A: {embed, out}."""

    A: NamedArray

    def __call__(self, x, mask, *, key=None):
        return hax.dot(x, self.A, axis="embed").rename({"out": "embed"})


def linear_model(matrix, **depth):
    model = build(small_config("constant", depth=DepthConfig(**depth)))
    A = hax.named(jnp.asarray(matrix, jnp.float32), ("embed", "out"))
    flow = dataclasses.replace(model.transformer.flow, weights=Linear(A))
    return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, flow=flow))


def one(seed=7, length=LENGTH):
    return random_tokens(seed, batch=1, length=length)["batch", 0]


def dense_tangent(model, x0):
    """d x(1) / d x(0) of the whole sequence, [n, n], by reverse-mode differentiation of the model's own flow."""

    @jax.jit
    @jax.jacrev
    def jacobian(x):
        return model.transformer.flow(hax.named(x, x0.axes), Inputs.of()).array

    return np.asarray(jacobian(x0.array), np.float64).reshape(x0.array.size, -1)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_strong"])
def test_official_token_exponents(name):
    """1e-4; for `strong` in exp(lambda) = |R_ii|: the logarithm magnifies the rounding of small ones."""
    model, arrays = golden(name)
    tokens = arrays[f"{name}/tokens"]
    for case, options in {
        "consistent/out6": {},
        "official/out6": {"official_times": True},
        "official/out2": {"official_times": True, "output_position": 2},
    }.items():
        ours, reference = lyapunov.token_exponents(model, tokens, **options), arrays[f"{name}/{case}"]
        if name == "gpt2":
            np.testing.assert_allclose(ours, reference, atol=1e-5)
        np.testing.assert_allclose(np.exp(ours), np.exp(reference), atol=1e-4)
    assert (ours[:, 3:] == 0).all()  # causality: tokens after the output position, exactly
    assert (ours[:, :3] != 0).all()


def test_a_linear_flow_has_the_exponents_of_its_matrix():
    """Symmetric A: the eigenvalues. Any A: log singular values of exp(A). Each once for every token."""
    rng = np.random.default_rng(0)
    general = rng.normal(size=(WIDTH, WIDTH)) / 4
    symmetric = (general + general.T) / 2
    for matrix in (symmetric, general):
        expected = np.log(np.linalg.svd(scipy.linalg.expm(matrix))[1])
        if matrix is symmetric:
            np.testing.assert_allclose(expected, np.sort(np.linalg.eigvalsh(matrix))[::-1], atol=1e-12)
        model = linear_model(matrix, solver="rk4", steps=6)
        full = lyapunov.spectrum(model, one(), WIDTH * LENGTH)
        # fp32, and RK4 with steps of 1/6: the error is (|A| / 6)^5 / 120.
        np.testing.assert_allclose(full, np.repeat(expected, LENGTH), atol=1e-4)
        leading = lyapunov.spectrum(model, one(), 4)  # the largest three are one and the same exponent
        np.testing.assert_allclose(leading, np.repeat(expected, LENGTH)[:4], atol=1e-4)
        np.testing.assert_allclose(lyapunov.divergence(model, one()).sum(), LENGTH * np.trace(matrix), atol=1e-4)


def test_eigenvectors_grow_by_their_eigenvalues():
    symmetric = np.diag(np.linspace(-1.0, 1.0, WIDTH))
    model = linear_model(symmetric, solver="rk4", steps=4)
    directions = np.zeros((2, LENGTH, WIDTH))
    directions[0, 1, 0], directions[1, 2, -1] = 3.0, 0.5  # their length does not matter
    logs = lyapunov.direction_exponents(model, one(), directions)
    assert logs.shape == (4, 2)
    np.testing.assert_allclose(logs.sum(axis=0), [-1.0, 1.0], atol=1e-4)
    np.testing.assert_allclose(logs, np.broadcast_to([-0.25, 0.25], (4, 2)), atol=1e-4)


def test_exponents_converge_with_steps():
    """Euler's error falls like 1/steps: halving the step halves it."""
    symmetric = np.diag(np.linspace(-1.0, 1.0, WIDTH))
    errors = [
        np.abs(lyapunov.spectrum(linear_model(symmetric, steps=n), one(), LENGTH) - 1.0).max() for n in (4, 8, 16)
    ]
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    assert (np.abs(ratios - 2.0) < 0.25).all(), errors


SPECTRUM_MODELS = {
    "generated": small_config(),
    "llama rk4": small_config("constant", block=llama(), depth=DepthConfig(solver="rk4", steps=2)),
    "controlled, prelude": small_config("constant", control=ControlConfig(dim=2, alpha=1.0), prelude_layers=1),
}


@pytest.mark.parametrize(
    "name", ["generated", *(pytest.param(n, marks=pytest.mark.slow) for n in SPECTRUM_MODELS if n != "generated")]
)
def test_spectrum_is_that_of_the_dense_tangent_map(name):
    """All tokens coupled: log singular values of d x(1) / d x(0), all 32, and the leading ones without forming it."""
    model, tokens = build(SPECTRUM_MODELS[name]), one(length=2)
    start = hax.named(jnp.asarray(trajectory.states(model, tokens)[0]), ("position", "embed"))
    sigma = np.linalg.svd(dense_tangent(model, start))[1]
    full = lyapunov.spectrum(model, tokens, sigma.size)
    np.testing.assert_allclose(np.exp(full), sigma, atol=2e-5 * sigma[0])
    np.testing.assert_allclose(lyapunov.spectrum(model, tokens, 5), np.log(sigma[:5]), atol=1e-4)
    # Random directions, as in Benettin's long-time problems, fall short of the leading ones.
    assert lyapunov.spectrum(model, tokens, 5, sweeps=0)[0] < np.log(sigma[0]) - 1e-3


@pytest.mark.slow
def test_volume_grows_by_the_divergence():
    """The sum of all exponents is log det D Phi: exactly sum log |det(I + h J)|, and the integral of the trace with
    short steps; the error of an Euler step is h^2 tr(J^2) / 2, so doubling the steps halves it."""
    model, tokens = build(small_config("constant", control=ControlConfig(dim=2, alpha=1.0))), one()
    errors = []
    for steps in (8, 16):
        read_model = model.with_depth(model.config.depth.on_grid(steps))
        total = lyapunov.spectrum(read_model, tokens, WIDTH * LENGTH).sum()
        integral = lyapunov.divergence(read_model, tokens).sum()
        tangent = Tangent(read(read_model), tokens)
        size = tangent.size
        eye = np.eye(size).reshape(size, *tangent.shape)
        steps_logs = [
            np.linalg.slogdet(np.asarray(tangent.forward(k, eye), np.float64).reshape(size, size))[1]
            for k in range(steps)
        ]
        np.testing.assert_allclose(total, sum(steps_logs), atol=1e-3)
        errors.append(abs(total - integral))
    assert errors[1] < 0.65 * errors[0], errors
    estimate = lyapunov.divergence(read_model, tokens, probes=256).sum()
    assert abs(estimate - integral) < 0.25 * abs(integral) + 0.5


OTHERS = {
    "Levanter gpt2": Gpt2Config(max_seq_len=12, hidden_dim=16, num_heads=2, num_layers=2, mlp_scale=2),
    "Levanter llama": LlamaConfig(
        max_seq_len=12, hidden_dim=16, intermediate_dim=24, num_heads=4, num_kv_heads=2, num_layers=2
    ),
    "ssm": small_config("constant", block=SsmBlockConfig(num_heads=2, state_size=4), depth=DepthConfig(steps=2)),
    "reversible": small_config(depth=DepthConfig(steps=2, adjoint="reversible")),
    "adaptive": small_config("constant", depth=DepthConfig(solver="heun", steps=2, rtol=0.1)),
}


@pytest.mark.parametrize("name", ["ssm", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS if n != "ssm")])
def test_other_models(name):
    """The states are the model's own; later tokens have exactly no influence; the exponents of the output token with
    itself are those of its own Jacobian; products with the tangent map and its transpose agree."""
    model, tokens = build(OTHERS[name]), one(length=4)
    reading = read(model)
    tangent = Tangent(reading, tokens)
    if name in ("reversible", "adaptive"):  # read by the plain steps of their solvers
        plain = model.with_depth(DepthConfig(solver=model.config.depth.solver, steps=2))
        states = eqx.filter_jit(lambda m: m.trajectory(tokens).array)(plain)
        np.testing.assert_allclose(tangent.states[1:], states, atol=1e-5)
    else:
        logits = eqx.filter_jit(lambda m: m(tokens, AttentionMask.causal()).array)(model)
        end = hax.named(tangent.states[-1], ("position", "embed"))
        ours = eqx.filter_jit(lambda r: r.logits(end).array)(reading)
        np.testing.assert_allclose(ours, logits, atol=1e-4)
    logs = lyapunov.token_exponents(reading, tokens, output_position=1)
    assert (logs[:, 2:] == 0).all()
    assert (np.abs(logs[:, :2]) > 0).any(axis=(0, 2)).all()
    rows = np.asarray(tangent.jacobian_rows(0, 1)[:, 1], np.float64)
    determinant = np.linalg.slogdet(np.eye(16) + rows)[1]
    np.testing.assert_allclose(logs[0, 1].sum(), determinant, atol=1e-4)
    u, v = np.random.default_rng(0).normal(size=(2, 3, *tangent.shape))
    np.testing.assert_allclose(np.sum(u * tangent.forward(1, v)), np.sum(tangent.backward(1, u) * v), rtol=1e-3)


def test_kaplan_yorke():
    assert lyapunov.kaplan_yorke([0.906, 0.0, -14.57]) == pytest.approx(2.0 + 0.906 / 14.57)  # Lorenz's system
    assert lyapunov.kaplan_yorke([-1.0, -2.0]) == 0.0
    assert np.isnan(lyapunov.kaplan_yorke([1.0, -0.5]))
    assert lyapunov.kaplan_yorke([-0.5, 1.0, -1.0]) == lyapunov.kaplan_yorke([1.0, -0.5, -1.0]) == 2.5


def test_intervals_cover_the_mean():
    """95 % intervals of 8 normal samples hold the true mean in 95 % of the cases (2000 draws: +-1.5 %)."""
    samples = np.random.default_rng(0).normal(3.0, 2.0, size=(8, 2000))
    interval = mean_interval(samples)
    covered = np.mean((interval.low < 3.0) & (interval.high > 3.0))
    assert abs(covered - 0.95) < 0.015
    with pytest.raises(UserError, match="at least two"):
        mean_interval(samples[:1])


def test_corpus():
    """A flow that mixes no tokens cannot tell the order of words: its shuffled texts have the same exponents."""
    texts = random_tokens(batch=3, length=4).array
    blind = linear_model(np.diag(np.linspace(-1.0, 1.0, WIDTH)), steps=2)
    result = lyapunov.corpus_exponents(blind, texts, k=2)
    assert result.spectrum.shape == (3, 2)
    assert result.scores.shape == (3, 4)
    assert np.abs(result.spectrum_difference.mean).max() < 1e-5
    seeing = lyapunov.corpus_exponents(build(small_config(depth=DepthConfig(steps=2))), texts, k=2)
    assert np.abs(seeing.spectrum - seeing.shuffled_spectrum).max() > 1e-3
    difference = seeing.score_difference
    assert (difference.low <= difference.high).all()
    assert difference.count == 3
    with pytest.raises(UserError, match="at least two sequences"):
        lyapunov.corpus_exponents(blind, texts[0])


def test_refusals():
    model, tokens = build(small_config()), one()
    with pytest.raises(UserError, match="the text is empty"):
        lyapunov.token_exponents(model, [])
    with pytest.raises(UserError, match="13 tokens, but the model's context is 12"):
        lyapunov.token_exponents(model, np.zeros(13, int))
    with pytest.raises(UserError, match=r"0\.\.63"):
        lyapunov.spectrum(model, [64], 1)
    with pytest.raises(UserError, match="whole numbers"):
        lyapunov.spectrum(model, [0.5], 1)
    with pytest.raises(UserError, match="one sequence"):
        lyapunov.spectrum(model, random_tokens(), 1)
    with pytest.raises(UserError, match=r"k must lie in 1\.\.48"):
        lyapunov.spectrum(model, tokens, 49)
    with pytest.raises(UserError, match="output_position"):
        lyapunov.token_exponents(model, tokens, 3)
    with pytest.raises(UserError, match="directions must have"):
        lyapunov.direction_exponents(model, tokens, np.ones((1, 2, 16)))
    with pytest.raises(UserError, match="zero"):
        lyapunov.direction_exponents(model, tokens, np.zeros((1, 3, 16)))
    with pytest.raises(UserError, match="weights at t = 0"):
        lyapunov.token_exponents(model.discretise(), tokens, official_times=True)
    heun = build(small_config(depth=DepthConfig(solver="heun", steps=2)))
    with pytest.raises(UserError, match="Euler"):
        lyapunov.token_exponents(heun, tokens, official_times=True)
    with pytest.raises(UserError, match="give the model"):
        lyapunov.token_exponents(read(model), tokens, official_times=True)
    with pytest.raises(UserError, match="only has Euler flows"):
        lyapunov.token_exponents(build(OTHERS["Levanter gpt2"]), tokens, official_times=True)
    with pytest.raises(UserError, match="An ordinary stack has one depth"):
        read(build(OTHERS["Levanter gpt2"]), steps=3)
    batched = random_tokens(batch=1, length=3)
    np.testing.assert_array_equal(lyapunov.token_exponents(model, batched), lyapunov.token_exponents(model, tokens))
