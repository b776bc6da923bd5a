"""Control in the programs of the analysis: what the model hears moves states and exponents."""

import numpy as np
import pytest
from support.earlier import restore

from qkvflow.analysis import lyapunov, report, spectral
from qkvflow.analysis.opening import texts_of
from qkvflow.analysis.trajectory import states
from qkvflow.errors import UserError
from qkvflow.runs import load_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return restore(tmp_path)


def test_a_text_is_read_under_control(place):
    run = load_run("runs/hybrid")
    dim = run.model.config.control.dim
    found = []
    for control in (None, [1.0] * dim):
        reading, (text,) = texts_of(run, ["a text"], control=control)
        found.append(states(reading, text.ids))
    assert np.abs(found[1] - found[0]).max() > 1e-3
    with pytest.raises(UserError, match=f"the model takes {dim}"):
        texts_of(run, ["a text"], control=[1.0] * (dim + 1))
    with pytest.raises(UserError, match="none"):
        texts_of(load_run("runs/flow"), ["a text"], control=[1.0])


def test_programs_refuse_control_that_nothing_would_hear(place):
    with pytest.raises(UserError, match="also give --text"):
        spectral.main(spectral.SpectralConfig("runs/hybrid", control=[1.0]))
    with pytest.raises(UserError, match="official code, which has no control"):
        lyapunov.main(lyapunov.LyapunovConfig("runs/hybrid", control=[1.0], official_times=True))
    with pytest.raises(UserError, match="components"):
        report.main(report.ReportConfig("runs/hybrid", text=["a"], control=[1.0] * 50))
