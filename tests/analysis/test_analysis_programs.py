"""The programs of the analysis on real runs: files, tables, errors; and the report in a browser."""

import json
import shutil

import numpy as np
import pytest

from qkvflow.analysis import lyapunov, report, spectral
from qkvflow.analysis.continuity import Continuity, Reading
from qkvflow.analysis.figures import save, token_map
from qkvflow.analysis.page import render
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig
from qkvflow.train_lm import main as train

FLOW = {
    "type": "neuralode",
    "max_seq_len": 32,
    "hidden_dim": 16,
    "block": {"type": "gpt2", "num_heads": 2},
    "weights": {"type": "generated", "time_embed_dim": 4, "sinusoidal_dim": 4},
    "depth": {"steps": 2},
}
SHORT = {"type": "gpt2", "max_seq_len": 16, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A flow, and one of Levanter's models with a shorter context; two steps of training each."""
    folder = tmp_path_factory.mktemp("analysis")

    def run(name, model):
        raw = {
            "model": model,
            "data": {"cache_dir": str(folder / "cache")},
            "run_dir": str(folder / "runs"),
            "trainer": {"id": name, "train_batch_size": 2, "num_train_steps": 2, "max_eval_batches": 1},
        }
        return train(decode(TrainConfig, raw))

    return run("flow", FLOW), run("ordinary", SHORT)


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


def sweep():
    readings = [
        {"solver": s, "steps": n, "evaluations": e * n, "loss": 5 - n / 9, "perplexity": 1.0, "displacement": 0.5}
        for s, e in (("euler", 1), ("rk4", 4))
        for n in (2, 4)
    ]
    return json.dumps({"checkpoint_step": 1, "readings": readings})


READINGS = tuple(
    Reading(solver, steps, steps, loss, state, state / 10)
    for solver, steps, loss, state in (("euler", 2, 5.0, 0.2), ("euler", 4, 4.9, 0.1), ("rk4", 2, 4.8, 0.0))
)
FOUND = Continuity(READINGS[0], READINGS, 1.0, 1)


@pytest.fixture
def browser():
    """Headless Chromium with its console recorded; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync"
    for flag in (*flags.split(), "no-first-run", "window-size=1200,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield page
    page.quit()


def emulate(page, width, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_the_page_is_safe_and_alone():
    """Texts cannot end the script, and nothing is fetched from anywhere."""
    html = render({"runs": [], "text": "</script><b>"})
    assert "</script><b>" not in html
    assert html.count("</script>") == 2
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in html.replace("http://www.w3.org/2000/svg", "")
    figure = token_map(["$", "\n", " "], np.zeros((2, 3, 4)))
    assert figure.get_axes()


def test_figures_are_saved_twice(tmp_path):
    figure = token_map(["a $x^2", "b"], np.random.default_rng(0).normal(size=(2, 2, 4)))
    written = save(figure, tmp_path / "some.name")
    assert [p.name for p in written] == ["some.name.png", "some.name.pdf"]
    assert all(p.is_file() for p in written)


@pytest.mark.slow
@pytest.mark.program
def test_report_in_a_browser(runs, browser, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    flow, ordinary = runs
    (flow / "evaluation").mkdir(exist_ok=True)
    (flow / "evaluation" / "depth.json").write_text(sweep())
    (flow / "evaluation" / "continuity.json").write_text(json.dumps(FOUND.as_json()))
    texts = ("--text", "for x: </script>", "né\tto")
    target = report.main(
        given(report.ReportConfig, "--run", flow, "--compare", ordinary, *texts, "--out", tmp_path / "page.html")
    )
    assert target.stat().st_size < 5_000_000
    run = browser.execute_script

    def eigenvalues():
        return run("return [...document.querySelectorAll('.eigenvalue')].map(c => c.getAttribute('cx'))")

    def set_value(event, name, value):
        run(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event(arguments[2]))",
            name,
            value,
            event,
        )

    for width, scheme in ((1200, "light"), (390, "dark")):
        emulate(browser, width, scheme)
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )
        browser.get(target.as_uri())
        assert run("return document.documentElement.scrollWidth") <= width  # nothing sticks out
        assert run("return document.documentElement.dataset.theme") == scheme
        assert not run("return [...document.querySelectorAll('main section')].filter(s => s.hidden).length")

        assert FOUND.verdict in run("return document.getElementById('continuity').textContent")
        assert len(run("return [...document.querySelectorAll('#continuity-charts svg')]")) == 3

        # The slider of t moves the eigenvalues.
        before = eigenvalues()
        assert len(before) == 2 * 8
        set_value("input", "spectra-t", 1)
        assert eigenvalues() != before
        run("document.querySelectorAll('#family button')[2].click()")
        assert len(eigenvalues()) == 16
        assert "FF" in run("return document.getElementById('plane-caption').textContent")

        # Hover values of tokens; the slider changes the colours.
        colours = "return [...document.querySelectorAll('.token')].map(n => n.style.background).join()"
        tip = "const t = document.getElementById('tip'); return getComputedStyle(t).display + t.textContent"
        late = run(colours)
        set_value("input", "text-t", 1)
        assert run(colours) != late
        assert run(tip).startswith("none")
        token = browser.find_elements("css selector", ".token")[4]
        run("arguments[0].scrollIntoView({block: 'center'})", token)
        webdriver.ActionChains(browser).move_to_element(token).perform()
        shown = run(tip)
        assert shown.startswith("block")
        assert "token 4" in shown
        assert "score" in shown
        # Other texts and models; markup in a text is only text.
        text = "return [...document.querySelectorAll('.token')].map(n => n.textContent).join('')"
        assert run(text) == "for x: </script>"
        set_value("change", "text", 1)
        assert "né" in run(text).replace("\\xC3\\xA9", "é")
        set_value("change", "text-run", 1)
        set_value("change", "spectra-run", 1)
        run("document.getElementById('theme').click()")
        assert run("return document.documentElement.dataset.theme") != scheme
        assert browser.get_log("browser") == []
    requests = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert {url.split(":")[0] for url in requests} <= {"file", "data"}
