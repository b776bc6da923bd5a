"""The report in headless Chromium: what it shows, how the keyboard reaches it, what it keeps; nothing from outside."""

import importlib.util
import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from qkvflow.analysis import report
from qkvflow.analysis.continuity import Continuity, Reading
from qkvflow.cli import parse

READINGS = tuple(
    Reading(solver, steps, steps, loss, state, state / 10)
    for solver, steps, loss, state in (("euler", 2, 5.0, 0.2), ("euler", 4, 4.9, 0.1), ("rk4", 2, 4.8, 0.0))
)
FOUND = Continuity(READINGS[0], READINGS, 1.0, 1)
NAME = "flow<img onerror=hacked() id=evil>'&"
TEXTS = ("</script><b>evil", "né\tto")
WIDTHS = ((1400, "light"), (390, "dark"), (390, "light"), (1400, "dark"))


def sweep():
    readings = [
        {"solver": s, "steps": n, "evaluations": e * n, "loss": 5 - n / 9, "perplexity": 1.0, "displacement": 0.5}
        for s, e in (("euler", 1), ("rk4", 4))
        for n in (2, 4)
    ]
    return json.dumps({"checkpoint_step": 1, "readings": readings})


EXITS = [
    {"rule": "kl", "threshold": t, "loss": x, "evaluations": n, "of": 2} for t, x, n in ((0, 5.0, 2), (1, 5.1, 1.5))
]


MEASURED = (("steps", "2", 5.0, 2, 1.0), ("exit", "kl", 5.01, 1.5, 1.2), ("draft", "4 at 1", 5.0, 1.1, 1.6))
ANYTIME = [
    {"kind": k, "name": n, "loss": x, "evaluations": e, "tokens_per_second": 9.0 * s, "speed": s}
    for k, n, x, e, s in MEASURED
]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The page of a flow whose folder has a bad name, with one of Levanter's models over it."""
    folder = tmp_path_factory.mktemp("page")
    flow = folder / NAME
    shutil.copytree(runs[0], flow, ignore=shutil.ignore_patterns("analysis", "evaluation"))
    (flow / "evaluation").mkdir()
    (flow / "evaluation" / "depth.json").write_text(sweep())
    (flow / "evaluation" / "continuity.json").write_text(json.dumps(FOUND.as_json()))
    (flow / "evaluation" / "exits.json").write_text(json.dumps({"checkpoint_step": 2, "exits": EXITS}))
    (flow / "evaluation" / "anytime.json").write_text(json.dumps({"checkpoint_step": 2, "readings": ANYTIME}))
    options = ["--run", flow, "--compare", runs[1], "--text", *TEXTS, "--draws", 2, "--shuffles", 2, "--k", 3]
    target = report.main(parse(report.ReportConfig, [str(o) for o in [*options, "--out", folder / "page.html"]])[0])
    assert target.stat().st_size < 5_000_000
    return target


@pytest.fixture(scope="module")
def driver():
    """Headless Chromium without network, with its console recorded; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    program = shutil.which("chromedriver")
    if chromium is None or program is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync"
    for flag in (*flags.split(), "no-first-run", "window-size=1400,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    found.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    found.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield found
    found.quit()


@pytest.fixture
def browser(driver):
    """The browser; afterwards nothing was logged, and nothing but the file was asked for."""
    driver.get("about:blank")
    driver.get_log("browser")
    yield driver
    assert driver.get_log("browser") == []
    requests = [
        message["params"]["request"]["url"]
        for entry in driver.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert {url.split(":")[0] for url in requests} <= {"file", "data", "about"}


def show(browser, page, width=1400, scheme="light", address=""):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get(page.as_uri() + address)
    return browser.execute_script


def choose(run, name, value, event="change"):
    find = "const s = document.getElementById(arguments[0]);"
    run(f"{find} s.value = arguments[1]; s.dispatchEvent(new Event(arguments[2]))", name, value, event)


def places(run, kind="eigenvalue"):
    return run(f"return [...document.querySelectorAll('.{kind}')].map(c => c.outerHTML)")


pytestmark = [pytest.mark.slow, pytest.mark.program]


def test_it_opens_with_findings(browser, page):
    run = show(browser, page)
    sentences = run("return [...document.querySelectorAll('#opening li')].map(n => n.textContent)")
    assert len(sentences) == 3
    assert "nats per token" in sentences[0]
    assert "next tokens are correct" in sentences[1]
    assert sentences[2].startswith("In flow<img")
    assert run("return document.querySelector('#hero svg').getBoundingClientRect().top") < 900
    assert not run("return document.getElementById('configuration').open")
    made = run("return document.getElementById('made').textContent")
    assert "qkvflow 0." in made
    assert "20" in made[:4]
    assert "built-in text" in made
    command = run("return document.getElementById('command').textContent")
    assert command.startswith("python -m qkvflow.analysis.report --run ")
    assert "--draws 2" in command


@pytest.mark.parametrize(("width", "scheme"), WIDTHS)
def test_it_fits_and_is_alive(browser, page, width, scheme):
    run = show(browser, page, width, scheme)
    assert run("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    assert run("return document.documentElement.dataset.theme") == scheme
    assert not run("return [...document.querySelectorAll('main section')].filter(s => s.hidden).length")
    # One size of text in all figures: they are drawn at the width they have.
    sizes = run("return [...document.querySelectorAll('svg text')].map(t => getComputedStyle(t).fontSize)")
    assert set(sizes) == {"13px"}
    scales = run(
        "return [...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().width)"
        ".map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
    )
    assert np.allclose(scales, 1, atol=0.01)
    # Ink on every coloured cell: at least 4.5:1, by the rule of WCAG.
    worst = run(
        """const lum = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((a, v, i) => a + v * [0.2126, 0.7152, 0.0722][i], 0);
        return Math.min(...[...document.querySelectorAll('.token, .lens td')].map(n => { const s = getComputedStyle(n);
            const [a, b] = [lum(s.color), lum(s.backgroundColor)];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }))"""
    )
    assert worst >= 4.5
    run("document.getElementById('theme').click()")
    assert run("return document.documentElement.dataset.theme") != scheme


def test_names_and_texts_stay_text(browser, page):
    run = show(browser, page)
    assert run("return document.getElementById('title').textContent") == NAME + " · ordinary"
    assert run("return document.title").startswith("qkvflow: " + NAME)
    assert run(
        "return document.getElementById('evil') === null && document.querySelectorAll('main b, main img').length === 0"
    )
    text = "return [...document.querySelectorAll('.tokens')].map(b => [...b.children].map(n => n.textContent).join(''))"
    assert run(text) == [TEXTS[0]] * 2
    choose(run, "text", 1)
    assert all("né" in t.replace("\\xC3\\xA9", "é") for t in run(text))
    assert run("return document.getElementById('evil') === null")


def test_one_choice_moves_all_panels(browser, page):
    run = show(browser, page)
    # t: eigenvalues, tokens, attention, and the mark in every chart.
    looks = {
        "eigenvalues": "return [...document.querySelectorAll('.eigenvalue')].map(n => n.outerHTML).join()",
        "tokens": "return [...document.querySelectorAll('.token')].map(n => n.style.background).join()",
        "attention": "return document.querySelector('#attention image').getAttribute('href')",
        "lens": "return [...document.querySelectorAll('#lens tr')].findIndex(r => r.className === 'now')",
        "charts": "return [...document.querySelectorAll('.cursor')].map(n => n.getAttribute('x1')).join()",
    }
    before = {name: run(script) for name, script in looks.items()}
    choose(run, "t", 0, "input")
    after = {name: run(script) for name, script in looks.items()}
    assert [name for name in looks if before[name] == after[name]] == []
    assert run("return document.getElementById('t').getAttribute('aria-valuetext')").startswith("layer-time 0.000")
    # The flow has weights between the times of training, the slider reaches them.
    times = run("return T")
    assert len(times) >= 17
    choose(run, "t", times.index(0.25), "input")
    assert "between times" in run("return document.querySelector('#plane svg').textContent")
    # The checkpoint.
    before = places(run), run("return document.querySelector('#hero path').getAttribute('d')")
    choose(run, "step", 0, "input")
    assert places(run) != before[0]
    assert "checkpoint of step" in run("return document.getElementById('step').getAttribute('aria-valuetext')")
    # The model: its own eigenvalues and lens, one overlay of lines for all.
    before = places(run)
    choose(run, "run", 1)
    assert places(run) != before
    assert "ordinary" in run("return document.getElementById('lens').getAttribute('aria-label')")
    legend = run("return document.querySelector('#hero svg').textContent")
    assert NAME in legend
    assert "ordinary" in legend
    assert "untrained" in legend
    assert "shuffled" in legend
    # Playing moves t.
    run("document.getElementById('t').value = 0; document.getElementById('play').click()")
    waited = "const d = arguments[0]; setTimeout(() => d([state.t, document.getElementById('play').textContent]), 1200)"
    t, name = browser.execute_async_script(waited)
    assert name == "stop"
    assert t > 0


def test_the_plane(browser, page):
    run = show(browser, page)
    assert len(places(run)) == 2 * 8
    assert len(places(run, "unit")) <= 1
    assert len(places(run, "fresh")) == 2 * 8
    assert "head 0" in run("return document.querySelector('#plane svg').textContent")
    run("document.getElementById('trails').click()")
    paths = run("return [...document.querySelectorAll('.trail')].map(p => p.getAttribute('d').split('L').length)")
    assert paths == [len(run("return RUNS[0].times"))] * 16
    choose(run, "head", 1)
    assert len(places(run)) == 8
    run("document.getElementById('cloud').click()")
    assert places(run, "fresh") == []
    before = places(run)
    choose(run, "scale", "symlog")
    assert places(run) != before
    run("document.getElementById('all').click()")
    assert "ordinary" in run("return document.querySelector('#plane svg').textContent")
    run("document.querySelectorAll('#family button')[2].click()")
    assert "FF" in run("return document.querySelector('#plane svg').textContent")
    assert "FF" in run("return document.querySelector('[data-of=spectra]').textContent")


def test_tokens_lens_and_attention(browser, page):
    webdriver = pytest.importorskip("selenium.webdriver")
    run = show(browser, page)
    outputs = run("return outputsOf()")
    assert len(outputs) == 3
    colours = "return [...document.querySelectorAll('.token')].map(n => n.style.background).join()"
    before = run(colours)
    choose(run, "output", outputs[0])
    assert run(colours) != before
    framed = "b => [...b.children].findIndex(n => n.className.includes('output'))"
    shown = run(f"return [...document.querySelectorAll('.tokens')].map({framed})")
    assert shown == [outputs[0]] * 2
    assert "0" in run("return document.getElementById('tokens-scale').textContent")
    tip = "const t = document.getElementById('tip'); return getComputedStyle(t).display + t.textContent"
    assert run(tip).startswith("none")
    token = browser.find_elements("css selector", ".token")[4]
    run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
    webdriver.ActionChains(browser).move_to_element(token).perform()
    assert run(tip).startswith("block")
    assert "token 4" in run(tip)
    # The marks of the lens are where the prediction is the next token.
    marked = "r => [...r.cells].slice(1).map(c => c.className === 'right')"
    right = run(f"return [...document.querySelectorAll('#lens tr')].slice(1).map({marked})")
    truth = run(
        "const d = describeOf(), l = textOf().lens; return l.top.map(row => row.map((top, i) =>"
        " i + 1 < d.ids.length && top[0] === d.ids[i + 1]))"
    )
    assert right == truth
    cells = "return [...document.querySelectorAll('#lens td')].map(c => c.textContent)"
    seen = {tuple(run(cells))}
    for mode in ("rank", "entropy", "kl"):
        choose(run, "mode", mode)
        seen.add(tuple(run(cells)))
    assert len(seen) == 4
    assert set(run(cells)[-len(TEXTS[0]) :]) == {"0.00"}  # the end says what it says itself
    assert "predicted to repeat" in run("return document.getElementById('echo').textContent")
    # What the map is drawn from is what attention was, to the size of its steps.
    rows = run("return mapsNow().map(m => m.map(row => row.reduce((a, b) => a + b, 0)))")
    assert np.allclose(rows, 1, atol=0.1)
    before = run("return document.querySelector('#attention image').getAttribute('href')")
    choose(run, "attention-head", 1)
    assert run("return document.querySelector('#attention image').getAttribute('href')") != before


def test_by_keyboard(browser, page):
    keys = pytest.importorskip("selenium.webdriver").Keys
    run = show(browser, page)
    stops = run(
        "return [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex]')]"
        ".filter(n => n.tabIndex >= 0 && n.checkVisibility()).length"
    )
    assert stops < 100
    here = "const n = document.activeElement; return [n.tabIndex, [...n.parentNode.children].indexOf(n)]"
    for box, cell in ((".tokens", ".token"), ("#lens", "td")):
        first = f"document.querySelector('{box}')"
        assert run(f"return {first}.querySelectorAll('{cell}[tabindex=\"0\"]').length") == 1
        run(f"{first}.querySelector('[tabindex=\"0\"]').focus()")
        _, place = run(here)
        browser.switch_to.active_element.send_keys(keys.ARROW_RIGHT)
        assert run(here) == [0, place + 1]
    # A button keeps the focus when it is pressed, a cell when its panel is drawn again.
    run("document.querySelectorAll('#family button')[0].focus()")
    browser.switch_to.active_element.send_keys(keys.ENTER)
    assert run("return document.activeElement.textContent") == "QK"
    assert run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    run("document.querySelector('#lens [tabindex=\"0\"]').focus(); set({mode: 'rank'})")
    assert run("return document.activeElement.closest('#lens') !== null")
    run("document.querySelector('#hero svg').focus()")
    browser.switch_to.active_element.send_keys(keys.ARROW_LEFT)
    assert "layer-time t" in run("return document.getElementById('spoken').textContent")


def test_what_it_keeps(browser, page):
    """Every figure as SVG (with its own styles), PNG and CSV; every view as an address; all of it on paper."""
    run = show(browser, page)
    kept = run(
        "return figures.filter(f => f.drawn).map(f => [f.name, svgText(standalone(f.drawn.svg)), csv(f.drawn.csv())])"
    )
    assert len(kept) >= 14
    for name, drawn, numbers in kept:
        assert "var(" not in drawn, name
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
        assert numbers.count("\r\n") > 2, name
    for host in ("tokens", "lens-box"):
        drawn = run("return svgText(pictured(document.getElementById(arguments[0])))", host)
        assert len(list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"))) >= 20
    size = browser.execute_async_script(
        "const d = arguments[0]; png(standalone(figures[0].drawn.svg), b => d([b.type, b.size]))"
    )
    assert size[0] == "image/png"
    assert size[1] > 1000
    assert run("return document.querySelectorAll('.save').length") >= 16
    choose(run, "run", 1)
    choose(run, "mode", "kl")
    choose(run, "t", 0, "input")
    address = run("return location.hash")
    run = show(browser, page, address="#lens-section" + address[address.index("?") :])
    state = run("return state")
    assert (state["run"], state["mode"], state["t"]) == (1, "kl", 0)
    browser.execute_async_script("setTimeout(arguments[0], 800)")
    assert run("return Math.abs(document.getElementById('lens-section').getBoundingClientRect().top)") < 300
    show(browser, page, address="#evil?run=99&t=abc&text=-4&nothing=1")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert run("return getComputedStyle(document.getElementById('controls')).display") == "none"
    assert run("return getComputedStyle(document.querySelector('figure .save')).display") == "none"
    assert browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def axe() -> str:
    """The source of axe-core, from the variable AXE or one of the packages that carry it; skips where there is none."""
    found = [Path(os.environ["AXE"])] if "AXE" in os.environ else []
    for package, path in (
        ("axe_core_python", "axe.min.js"),
        ("axe_selenium_python", "node_modules/axe-core/axe.min.js"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            found.append(Path(spec.origin).parent / path)
    for file in found:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    pytest.skip("axe-core is not installed: pip install axe-core-python, or AXE=path/to/axe.min.js")


@pytest.mark.parametrize(("width", "scheme"), WIDTHS)
def test_axe_finds_nothing_serious(browser, page, width, scheme):
    source = axe()
    run = show(browser, page, width, scheme)
    run("document.getElementById('configuration').open = true; document.querySelector('.save details').open = true")
    run(source + "; window.axe = axe")
    found = browser.execute_async_script(
        "const d = arguments[0], told = v => [v.id, v.impact, v.nodes.slice(0, 3).map(n => n.html)];"
        "axe.run(document, {resultTypes: ['violations']})"
        ".then(r => d(r.violations.map(told)), e => d([['failed', 'serious', String(e)]]))"
    )
    assert [v for v in found if v[1] in ("serious", "critical")] == []
