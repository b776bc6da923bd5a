"""`eval --continuity`: what it refuses before any text is read, and what it writes."""

import json
import math

import pytest
import yaml
from support.earlier import restore

from qkvflow import eval_lm
from qkvflow.analysis.continuity import Continuity, Reading
from qkvflow.analysis.page import runs
from qkvflow.errors import UserError
from qkvflow.runs import load_run


@pytest.fixture
def flow(tmp_path, monkeypatch):
    folder = restore(tmp_path / "earlier")
    monkeypatch.chdir(folder)
    return folder / "runs" / "flow"


@pytest.mark.parametrize(
    ("depth", "why"),
    [({"step_size": "residual"}, "step_size: residual"), ({"steps": 20_000}, "80000 steps are too many")],
)
def test_flows_without_finer_grids_are_refused_before_any_text_is_read(flow, monkeypatch, depth, why):
    config = yaml.safe_load((flow / "config.yaml").read_text())
    config["model"]["depth"] |= depth
    (flow / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(eval_lm, "RunEvaluator", lambda *args: pytest.fail("text is read"))
    with pytest.raises(UserError, match=why):
        eval_lm.main(eval_lm.EvalConfig("runs/flow", continuity=True))


def test_what_is_not_finite_is_null_in_the_file_and_on_the_page(flow, monkeypatch, capsys):
    nan = Reading("rk4", 12, 48, math.nan, math.nan, math.nan)
    readings = (Reading("euler", 3, 3, 5.0, 0.1, 0.1), nan)
    monkeypatch.setattr(eval_lm, "continuity", lambda *args, **options: Continuity(readings[0], readings, math.nan, 1))
    eval_lm.main(eval_lm.EvalConfig("runs/flow", continuity=True, max_eval_batches=1))
    assert "not an ODE by the rule: the loss is nan for rk4 with 12 steps" in capsys.readouterr().out
    text = (flow / "evaluation" / "continuity.json").read_text()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written["order"] is None
    assert [written["readings"][-1][name] for name in ("loss", "state", "kl")] == [None] * 3
    shown = runs.continuity(load_run("runs/flow"))
    assert shown == {"verdict": written["verdict"], "readings": written["readings"]}
