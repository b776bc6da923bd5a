"""The report of a run whose depth grew: each checkpoint on its own layer-times, in the data and in what is drawn."""

import json
import re
import shutil
import subprocess

import pytest
from support.tiny import FLOW, tiny

from qkvflow.analysis import report
from qkvflow.analysis.page.render import files
from qkvflow.analysis.spectral import over_training
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.runs.config import TrainConfig
from qkvflow.train_lm import main as train

STEPS = {0: 1, 1: 1, 2: 3, 3: 3}  # of the flow, in each training step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    model = {**FLOW, "depth": {"steps": {"grow": {"0.0": 1, "0.5": 3}}}}
    kept = {"num_train_steps": 4, "checkpointer": {"save_interval": None, "keep": [{"every": 1}]}}
    return train(decode(TrainConfig, tiny(folder, "grown", model, **kept)))


@pytest.fixture(scope="module")
def data(run):
    options = ["--run", run, "--text", "ab cd", "--draws", 1, "--shuffles", 2, "--k", 2, "--outputs", 1]
    page = report.main(parse(report.ReportConfig, [str(o) for o in [*options, "--checkpoints", 4]])[0])
    found = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def ends(steps):
    return [round(k / steps, 4) for k in range(steps + 1)]


def test_each_checkpoint_has_its_own_times(run, data):
    (shown,) = data["runs"]
    found = {snapshot["step"]: snapshot["texts"][0] for snapshot in shown["snapshots"]}
    assert set(found) == {1, 2, 3}  # Levanter keeps none after the first step
    for step, text in found.items():
        assert text["ends"] == ends(STEPS[step])
        assert len(text["lens"]["loss"]) == len(text["motion"]["displacement"]) == STEPS[step] + 1
        assert len(text["scores"][0]) == len(text["exponents"]) == len(text["times"]) == STEPS[step]
        assert all(null["ends"] == text["ends"] for null in text["shuffled"])
        told = re.search(r"reached at t = ([\d.]+)", text["conclusions"]["lens"])
        assert told is None or min(abs(float(told[1]) - t) for t in text["ends"]) < 0.01
    assert shown["fresh"]["texts"][0]["ends"] == ends(3)
    assert over_training(run, "qk").eigenvalues.array.shape[:2] == (3, 3)


def test_the_page_draws_them(data):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    web = files("qkvflow.analysis.page") / "web"
    code = {
        name: (web / f"{name}.js").read_text() for name in ("base", "state", "training", "tokens", "lens", "motion")
    }
    script = """
const given = require("fs").readFileSync(0, "utf8"), node = { style: {}, getContext: () => ({}), append() {} };
const document = { getElementById: id => ({ ...node, textContent: given }), createElement: () => node };
const addEventListener = () => {}, location = { hash: "" };
const lineChart = (width, spec) => spec;
const spread = (name, x, rows) => ({ points: rows.map((row, k) => [x[k], mean(row)]) });
const DASHES = [];
""" + "\n".join(code.values())
    script += """
const found = {};
for (const { step } of RUNS[0].snapshots) {
  state.step = step;
  const charts = [hero(1), ...Object.keys(MOTION).map(key => motionChart(key)(1)), entropyChart(1), growthChart(1)];
  const cells = textOf().ends.flatMap((t, k) => describeOf().labels.map((_, i) => [
    ...Object.keys(METRICS).map(metric => valueOf(RUNS[0], metric, k, i)), lensCell(RUNS[0], k, i).text]));
  found[step] = { charts: charts.map(c => c.series.map(s => s.points)), rows: cells.length, scale: tokenScale() };
}
console.log(JSON.stringify(found));
"""
    done = subprocess.run([node, "-e", script], input=json.dumps(data), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for step, drawn in json.loads(done.stdout).items():
        steps = STEPS[int(step)]
        assert drawn["rows"] == 5 * (steps + 1)
        (own, shuffled, fresh), *others = drawn["charts"]
        assert [[x for x, _ in line] for line in (own, shuffled, fresh)] == [ends(steps), ends(steps), ends(3)]
        points = [point for lines in others for line in lines for point in line]
        assert all(isinstance(number, int | float) for point in points for number in point)
