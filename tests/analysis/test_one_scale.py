"""Flows and ordinary layers on one scale: speeds, times and intervals mean the same for both; numbers or a reason."""

import json
import shutil
import subprocess
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
from support.models import build, random_tokens, small_config

from qkvflow.analysis import figures, lyapunov, spectral
from qkvflow.analysis.corpus import bootstrap_interval
from qkvflow.analysis.reading import read
from qkvflow.analysis.trajectory import motion, states
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError

ORDINARY = small_config("per_layer", depth=DepthConfig(steps=3, step_size="residual"))
WEB = Path(figures.__file__).parent / "page" / "web"


@pytest.mark.parametrize("config", [small_config("constant"), ORDINARY], ids=["flow", "layers"])
def test_speed_integrates_to_the_length_of_the_path(config):
    """Over t in [0, 1]: so it is never less than the straight displacement, for layers of step length 1 either."""
    model, tokens = build(config), random_tokens()["batch", 0]
    x = states(model, tokens)
    found = motion(model, tokens)
    path = np.linalg.norm(np.diff(x, axis=0), axis=-1).sum(0)
    np.testing.assert_allclose(found.speed.mean(0), path, rtol=1e-5)
    assert (path >= np.linalg.norm(x[-1] - x[0], axis=-1) * (1 - 1e-6)).all()


@pytest.mark.parametrize("config", [small_config("constant"), ORDINARY], ids=["flow", "layers"])
def test_what_is_measured_of_a_step_stands_at_the_time_of_its_weights(config):
    model = build(config)
    assert tuple(read(model).times) == tuple(spectral.training_times(model))
    (line,) = figures.entropy(read(model).times, np.ones((3, 1, 4))).get_axes()[0].get_lines()
    assert tuple(line.get_xdata()) == tuple(spectral.training_times(model))


def test_the_page_draws_the_entropy_of_a_step_at_the_time_of_its_weights():
    """Its own, that of other runs and that of the nulls: by the page's own code, with one text of two runs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    stubs = """
const described = { labels: ["a", "b"] };
const run = (name, times) => ({ name, texts: [described], text: { times, entropy: [[[0, 0.5]], [[0, 0.6]]] } });
const RUNS = [run("one", [0.5, 1]), run("other", [0.4, 0.9])], MANY = true, state = { run: 0, t: 0 }, DASHES = [];
const runOf = () => RUNS[0], textOf = (r = runOf()) => r.text, describeOf = (r = runOf()) => r.texts[0];
const colour = () => "", mean = v => v[0];
const nullSeries = (read, times) => [{ points: times({ times: [0.3, 0.8] }).map(t => [t, 0]) }];
const lineChart = (width, spec) => spec;
"""
    script = stubs + (WEB / "motion.js").read_text() + "console.log(JSON.stringify(entropyChart(1).series"
    script += ".map(s => s.points.map(p => p[0]))))"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0.5, 1], [0.4, 0.9], [0.3, 0.8]]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(number):
    model = build(small_config("constant"))
    broken = eqx.tree_at(lambda m: m.transformer.flow.weights.mlp.c_fc.bias, model, replace_fn=lambda b: b * 0 + number)
    for entry in (read, lambda m: lyapunov.token_exponents(m, random_tokens()["batch", 0]), spectral.qk_eigenvalues):
        with pytest.raises(UserError, match=r"finite.*c_fc|c_fc.*finite"):
            entry(broken)


def test_intervals_of_scores_stay_where_scores_can_be():
    scores = np.asarray([[0.0, 0.01], [0.0, 0.0], [0.5, 0.02], [0.0, 0.0]])
    found = bootstrap_interval(scores)
    assert (found.low >= 0).all()
    assert (found.low <= found.mean).all()
    assert (found.mean <= found.high).all()
