"""The programs of the analysis on real runs: files, tables, errors."""

import shutil

import numpy as np
import pytest
from matplotlib.text import Text

from qkvflow.analysis import figures, lyapunov, report, spectral
from qkvflow.analysis.figures import save, token_map
from qkvflow.cli import parse
from qkvflow.errors import UserError


def given(config_class, *argv):
    return parse(config_class, [str(a) for a in argv])[0]


@pytest.mark.slow
@pytest.mark.program
def test_programs(runs, tmp_path, capsys):
    flow, ordinary = runs
    arrays = spectral.main(
        given(spectral.SpectralConfig, "--run", flow, "--times", "3", "--draws", "2", "--text", "a: b")
    )
    stored = np.load(flow / "analysis" / "spectral.npz")
    assert set(stored) == set(arrays)
    assert stored["times"].tolist() == [0.0, 0.5, 1.0]
    assert stored["qk_eigenvalues"].shape == (3, 2, 8)
    assert stored["qk_eigenvalues"].dtype == np.complex128
    assert stored["ff_untrained_radius"].shape == (2, 3)
    assert stored["jacobian_eigenvalues"].shape == (2, 16)
    for name in ("eigenvalues", "summary", "singular-values", "jacobian"):
        for kind in ("png", "pdf"):
            assert (flow / "analysis" / f"spectral-{name}.{kind}").stat().st_size > 1000
    spectral.main(given(spectral.SpectralConfig, "--run", ordinary, "--draws", "0", "--out", tmp_path / "here"))
    assert np.load(tmp_path / "here" / "spectral.npz")["times"].tolist() == [0.5, 1.0]

    options = ("--k", 3, "--texts", 2, "--length", 6)
    arrays = lyapunov.main(given(lyapunov.LyapunovConfig, "--run", flow, "--text", "Note: x", *options))
    stored = np.load(flow / "analysis" / "lyapunov.npz")
    assert "".join(stored["labels"]) == "Note: x"
    assert stored["token_exponents"].shape == (2, 7, 16)
    assert (np.diff(stored["spectrum"]) <= 1e-6).all()
    np.testing.assert_allclose(stored["spectrum"], stored["step_exponents"].sum(0))
    assert stored["corpus_spectrum"].shape == (2, 3)
    assert stored["corpus_shuffled_scores"].shape == (2, 6)
    assert (flow / "analysis" / "lyapunov-corpus.pdf").is_file()
    # The beginning of the validation text, at the official times.
    lyapunov.main(given(lyapunov.LyapunovConfig, "--run", flow, "--texts", 0, "--official_times", "true"))
    assert len(np.load(flow / "analysis" / "lyapunov.npz")["tokens"]) == 32
    assert "largest exponents" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.program
def test_refusals(runs, tmp_path):
    flow, ordinary = runs
    for program, config in ((lyapunov, lyapunov.LyapunovConfig), (report, report.ReportConfig)):
        with pytest.raises(UserError, match="33 tokens, but the model's context is 32"):
            program.main(given(config, "--run", flow, "--text", "x" * 33))
        with pytest.raises(UserError, match="the text is empty"):
            program.main(given(config, "--run", flow, "--text", ""))
    with pytest.raises(UserError, match="20 tokens, but the model's context is 16"):
        report.main(given(report.ReportConfig, "--run", flow, "--compare", ordinary, "--text", "x" * 20))
    with pytest.raises(UserError, match="have no value at t"):
        spectral.main(given(spectral.SpectralConfig, "--run", ordinary, "--times", "0.3"))
    with pytest.raises(UserError, match=r"such as 0,0\.5,1"):
        spectral.main(given(spectral.SpectralConfig, "--run", flow, "--times", "soon"))
    with pytest.raises(UserError, match="at least 2"):
        lyapunov.main(given(lyapunov.LyapunovConfig, "--run", flow, "--texts", 1))
    with pytest.raises(UserError, match="there is no run"):
        report.main(given(report.ReportConfig, "--run", tmp_path / "nothing"))
    empty = tmp_path / "empty"
    shutil.copytree(flow, empty, ignore=shutil.ignore_patterns("checkpoints", "analysis"))
    for program, config in (
        (spectral, spectral.SpectralConfig),
        (lyapunov, lyapunov.LyapunovConfig),
        (report, report.ReportConfig),
    ):
        with pytest.raises(UserError, match="has no checkpoint yet"):
            program.main(given(config, "--run", empty))
    (flow / "evaluation").mkdir(exist_ok=True)
    (flow / "evaluation" / "depth.json").write_text("{")
    with pytest.raises(UserError, match=r"depth\.json cannot be read"):
        report.main(given(report.ReportConfig, "--run", flow, "--draws", 0))
    (flow / "evaluation" / "depth.json").unlink()
    (flow / "evaluation" / "continuity.json").write_text('{"readings": []}')
    with pytest.raises(UserError, match=r"continuity\.json cannot be read"):
        report.main(given(report.ReportConfig, "--run", flow, "--draws", 0))
    (flow / "evaluation" / "continuity.json").unlink()
    with pytest.raises(UserError, match="at most 4 runs, got 5"):
        report.main(given(report.ReportConfig, "--run", flow, "--compare", *[ordinary] * 4))
    with pytest.raises(UserError, match=r"no value at t = 0\.3"):
        report.main(given(report.ReportConfig, "--run", ordinary, "--times", "0.3,1"))
    with pytest.raises(UserError, match=r"in \[0, 1\], got 2"):
        report.main(given(report.ReportConfig, "--run", flow, "--times", "0,2"))
    with pytest.raises(UserError, match="checkpoints must be at least 1"):
        report.main(given(report.ReportConfig, "--run", flow, "--checkpoints", "0"))


def test_figures_are_saved_twice(tmp_path):
    figure = token_map(["a $x^2", "b"], np.random.default_rng(0).normal(size=(2, 2, 4)))
    written = save(figure, tmp_path / "some.name")
    assert [p.name for p in written] == ["some.name.png", "some.name.pdf"]
    assert all(p.is_file() for p in written)


def test_figures_have_one_size_of_text_and_say_what_they_show():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 2, 8)) + 1j * rng.normal(size=(3, 2, 8))
    values[1, 0, 0] = 90  # one far from all others
    times = np.linspace(0, 1, 3)
    drawn = figures.eigenvalues(times, {"qk": values, "ov": values}, {"qk": values / 9})
    plane = drawn.get_axes()[0]
    assert plane.get_xscale() == plane.get_yscale() == "symlog"
    assert {t.get_text() for t in drawn.legends[0].get_texts()} == {"head 0", "head 1", "untrained", "unit circle"}
    scores = rng.normal(size=(2, 5, 4))
    scores[:, -1] += 100  # the output itself does not set the scale
    tokens = token_map(list("abcde"), scores)
    assert tokens.get_axes()[0].images[0].norm.vmax < 50
    growth = figures.growth(rng.normal(size=(4, 3)))
    for figure in (drawn, tokens, growth):
        assert figure.get_supxlabel().startswith("Shows: ")
        assert "Surprising: " in figure.get_supxlabel()
        figure.draw_without_rendering()
        sizes = {t.get_fontsize() for t in figure.findobj(Text) if t.get_text()}
        assert len(sizes) == 1, sizes
