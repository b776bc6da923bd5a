"""Drafts, exits and shared caches as the programs offer them: what they give, and what they refuse."""

import json
import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml
from support.earlier import restore

from qkvflow import eval_lm, sample_lm, serve_lm
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.generation.engine import Engine
from qkvflow.models.exits import ExitConfig

pytestmark = pytest.mark.program
PROGRAMS = {
    "sample": (sample_lm.main, sample_lm.SampleConfig, ["--prompt", "ab", "--temperature", "0"]),
    "serve": (serve_lm.main, serve_lm.ServeConfig, ["--port", "0"]),
    "eval": (eval_lm.main, eval_lm.EvalConfig, []),
}
STAYS, LEAVES = "{rule: velocity, threshold: 0}", "{rule: velocity, threshold: 1.0e+9}"
SOME = ExitConfig("velocity", 1.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of 3 steps: `flow`, and `adaptive`, the same with steps that adapt."""
    folder = restore(tmp_path_factory.mktemp("anytime"))
    shutil.copytree(folder / "runs/flow", folder / "runs/adaptive")
    file = folder / "runs/adaptive/config.yaml"
    config = yaml.safe_load(file.read_text())
    config["model"]["depth"] = {"solver": "heun", "rtol": 1e-2, "atol": 1e-2}
    file.write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(autouse=True)
def stand_there(place, monkeypatch):
    monkeypatch.chdir(place)


def run(program, *words, run="flow"):
    main, config, given = PROGRAMS[program]
    return main(parse(config, ["--run", f"runs/{run}", *given, *words])[0])


@pytest.mark.parametrize(
    ("words", "same", "told"),
    [
        (["--draft_steps", "2", "--draft_tokens", "3"], True, "tokens per full pass"),
        (["--exit", STAYS], True, "decode: 14 tokens"),
        (["--exit", LEAVES], False, "exits: 1.00 of 3 steps per token"),
        (["--draft_steps", "2", "--exit", STAYS.replace(" 0", " 1.0e-9")], True, "exits: 3.00 of 3 steps per token"),
        (["--cache", "every 1"], True, "decode: 14 tokens"),
        (["--cache", "latest"], False, "decode: 14 tokens"),
    ],
)
def test_sample(words, same, told, capfd):
    (plain,) = run("sample")
    capfd.readouterr()
    (text,) = run("sample", *words)
    assert (text == plain) or not same
    assert told in capfd.readouterr().err


def test_exits_are_those_of_the_texts_however_they_are_batched(capfd):
    """The second of two batches is smaller: rows that it leaves empty have had texts before."""
    found = set()
    for size in (1, 2, 3):
        config = sample_lm.SampleConfig("runs/flow", prompt="ab", num_samples=3, batch_size=size, exit=SOME, seed=1)
        sample_lm.main(config)
        found.add(re.search(r"exits: [\d.]+", capfd.readouterr().err)[0])
    assert len(found) == 1
    assert found.isdisjoint({"exits: 1.00", "exits: 3.00"})


def test_the_warm_up_leaves_no_text(monkeypatch):
    """Or the first prompts are read one by one, by steps that were not compiled, and are missing in the exit counts."""
    clocks = []
    monkeypatch.setattr(Engine, "begin", lambda *args: pytest.fail("a prompt is read on its own"))
    monkeypatch.setattr(sample_lm._Clock, "report", lambda clock: clocks.append(clock) or "")
    run("sample", "--prompt", "abcd", "--temperature", "1", "--num_samples", "3", "--batch_size", "2", "--exit", LEAVES)
    (clock,) = clocks
    # The last token of a text is never read.
    assert clock.exited.tokens == clock.prompt_tokens + clock.new_tokens - 3


def test_eval(place):
    """The full model's loss beside what was asked for, printed, returned and written."""
    (plain,) = run("eval")
    full, left = run("eval", "--exit", LEAVES)
    assert full.loss == pytest.approx(plain.loss, rel=1e-5)
    assert (full.evaluations, left.evaluations, left.of) == (3, 1, 3)
    cost = abs(left.loss - full.loss) / 2
    _, found = run("eval", "--exit", STAYS, "--calibrate", str(cost))
    assert found.loss <= full.loss + cost
    written = json.loads((place / "runs/flow/evaluation/exits.json").read_text())["exits"]
    assert written[1]["threshold"] == found.threshold
    exact, latest = run("eval", "--cache", "latest")
    assert exact.loss == pytest.approx(plain.loss, rel=1e-5)
    assert (exact.kept, latest.kept, latest.of) == (3, 1, 3)
    assert (place / "runs/flow/evaluation/cache.json").exists()


@pytest.mark.parametrize(
    ("programs", "words", "told"),
    [
        ("sample serve", ["--draft_steps", "3"], "draft_steps must be below the 3 steps"),
        ("sample serve", ["--draft_steps", "4", "--steps", "4"], "draft_steps must be below the 4 steps"),
        ("sample serve", ["--draft_steps", "0"], "draft_steps must be at least 1"),
        ("sample serve", ["--draft_tokens", "3"], "draft_steps is missing: also give draft_steps"),
        ("sample serve eval", ["--exit", "{rule: kl, threshold: -0.1}"], "threshold` must be at least 0"),
        ("sample serve eval", ["--exit", "{rule: word, threshold: 0.1}"], "Choices: kl, velocity, margin"),
        ("sample serve eval", ["--exit", "{rule: kl, threshold: 0.1, min_steps: 3}"], "min_steps must be below the 3"),
        ("sample", ["--exit", "{rule: kl, threshold: 0.1}", "--use_cache", "false"], "with use_cache: false"),
        ("sample", ["--draft_steps", "2", "--use_cache", "false"], "with use_cache: false"),
        (
            "sample serve",
            ["--draft_steps", "2", "--cache", "latest"],
            "draft_steps cannot be combined",
        ),
        ("sample serve eval", ["--exit", LEAVES, "--cache", "every 2"], "cannot be combined|one at a time"),
        ("sample serve eval", ["--cache", "often"], "Choices: exact, latest, every N"),
        ("eval", ["--calibrate", "0.01"], "--calibrate searches for the threshold of a rule"),
        ("eval", ["--exit", LEAVES, "--steps", "2,3"], "--exit evaluates one flow"),
        ("eval", ["--cache", "latest", "--continuity"], "--cache evaluates one flow"),
    ],
)
def test_refusals(programs, words, told):
    for program in programs.split():
        with pytest.raises(UserError, match=told):
            run(program, *words)


@pytest.mark.parametrize("words", [["--exit", LEAVES], ["--draft_steps", "2"], ["--cache", "latest"]])
def test_steps_that_adapt_have_nothing_of_this(words):
    programs = ["sample", "serve"] if "--draft_steps" in words else ["sample", "serve", "eval"]
    for program in programs:
        with pytest.raises(UserError, match="adaptive steps"):
            run(program, *words, run="adaptive")


@pytest.mark.slow
def test_serve(place):
    """A server that drafts and leaves early writes what `sample` writes with the same options."""
    words = ["--draft_steps", "2", "--draft_tokens", "2", "--exit", LEAVES]
    (text,) = run("sample", *words, "--max_new_tokens", "10")
    command = [sys.executable, "-m", "qkvflow.serve_lm", "--run", "runs/flow", "--port", "0", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while "http://" not in line:
                line = process.stderr.readline()
                assert line, "it ended before it served"
            body = {"prompt": "ab", "max_tokens": 10, "temperature": 0}
            answer = httpx.post(f"{line.split()[-1]}/completions", json=body, timeout=60).json()
        finally:
            process.kill()
    assert "ab" + answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 0
