"""`sample_lm` and `serve_lm` as processes, on a run that `train_lm` made: what a new user does."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from qkvflow import sample_lm, serve_lm
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.sample_lm import SampleConfig
from qkvflow.serve_lm import ServeConfig

pytestmark = pytest.mark.program

CONFIG = """
data: {tokenizer: byte, train: text.jsonl, validation_fraction: 0.2, control_key: control}
model:
  type: neuralode
  max_seq_len: 256
  hidden_dim: 16
  control: {dim: 2}
  block: {type: gpt2, num_heads: 2}
  weights: {type: generated, time_embed_dim: 4, sinusoidal_dim: 4}
  depth: {solver: euler, steps: 2}
trainer: {train_batch_size: 2, num_train_steps: 3, max_eval_batches: 1}
train_seq_len: 32
"""
EXIT = "{rule: velocity, threshold: 1}"


def program(*words, cwd, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    records = [{"text": f"line {i} of a text that is long enough. " * 4, "control": [i % 2, 0.0]} for i in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "tiny.yaml").write_text(CONFIG)
    result = program("qkvflow.train_lm", "--config_path", "tiny.yaml", cwd=folder)
    assert result.returncode == 0, result.stderr
    # The last lines say how to let the run write; the command works as it stands.
    (hint,) = [line for line in result.stdout.splitlines() if line.startswith("To generate text")]
    words = hint.split(":", 1)[1].split()
    is_command = [Path(words[0]).name, words[1]] == ["qkvflow", "sample"]
    assert is_command or words[:3] == ["python", "-m", "qkvflow.sample_lm"]
    return folder, words[words.index("--run") + 1]


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        (SampleConfig, ["--steps", "100000000"], "`steps` must be at least 1 and at most 65536"),
        (SampleConfig, ["--num_samples", "0"], "`num_samples` must be at least 1"),
        (SampleConfig, ["--num_samples", "100000000"], "100,000,000 texts are requested; at most 100,000"),
        (SampleConfig, ["--batch_size", "-1"], "`batch_size` must be at least 1"),
        (SampleConfig, ["--max_new_tokens", "0"], "`max_new_tokens` must be at least 1"),
        (ServeConfig, ["--max_length", "1"], "`max_length` must be at least 2"),
        (ServeConfig, ["--api_key", "secret "], "api_key begins or ends with a space"),
        (ServeConfig, ["--steps", "100000000"], "`steps` must be at least 1 and at most 65536"),
        (ServeConfig, ["--max_concurrent", "100000000"], "`max_concurrent` must be .* at most 1024"),
        (ServeConfig, ["--allowed_hosts", ""], "allowed_hosts has an empty name"),
        (SampleConfig, ["--exit", EXIT, "--cache", "every 2"], "cache: every 2 and exit cannot be combined"),
        (SampleConfig, ["--draft_steps", "2", "--cache", "latest"], "latest and draft_steps cannot be combined"),
        (ServeConfig, ["--exit", EXIT, "--cache", "latest"], "cache: latest and exit cannot be combined"),
        (ServeConfig, ["--draft_steps", "2", "--cache", "latest"], "latest and draft_steps cannot be combined"),
        (ServeConfig, ["--header_timeout", "0"], "`header_timeout` must be above 0"),
    ],
)
def test_what_no_machine_could_do_is_refused_before_the_run_is_read(program, words, told):
    given = ["--prompt", "a"] if program is SampleConfig else []
    main = sample_lm.main if program is SampleConfig else serve_lm.main
    with pytest.raises(UserError, match=told):
        main(parse(program, ["--run", "nowhere", *given, *words])[0])


def test_a_reader_of_a_text_that_has_enough_ends_it_without_a_word(trained):
    """As `sample_lm | head -c 30` does."""
    folder, run = trained
    words = ["--prompt", "a", "--max_new_tokens", "200", "--num_samples", "200", "--batch_size", "1"]
    command = [sys.executable, "-m", "qkvflow.sample_lm", "--run", run, *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert len(process.stdout.read(30)) == 30
        process.stdout.close()
        assert process.stderr.read().decode().splitlines() == [f"Loading {run} ...", "Compiling ..."]
        assert process.wait(60) == 0


def sample(trained, *words, **options):
    folder, run = trained
    return program("qkvflow.sample_lm", "--run", run, *words, cwd=folder, **options)


def test_sample(trained):
    words = ("--prompt", "Note: a # text ", "--max_new_tokens", "30", "--temperature", "1.0", "--control", "[5, -5]")
    result = sample(trained, *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Note: a # text "), "the prompt is text, not YAML"
    assert re.search(r"prefill: 15 tokens in .* tokens/s.*decode: \d+ tokens in .* tokens/s", result.stderr)


def test_too_long_a_prompt_from_a_pipe(trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 150 + "\n"))
    with pytest.raises(UserError, match=r"150 tokens and 150 new ones .* 256 positions"):
        sample_lm.main(SampleConfig(run=str(trained[0] / trained[1]), max_new_tokens=150))


@pytest.mark.slow
def test_many_prompts(trained, capsys):
    """Titles in order, each text as it is when it is made alone."""
    folder, run = trained
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "longer: ", "control": [9, 9]}\n')
    common = {"run": str(folder / run), "max_new_tokens": 8, "steps": 3, "solver": "heun", "seed": 2}
    file = str(folder / "prompts.jsonl")
    texts = sample_lm.main(SampleConfig(prompt_file=file, num_samples=2, batch_size=3, **common))
    shown = capsys.readouterr().out
    titles = [f"=== prompt {p} of 2, sample {s} of 2" for p in (1, 2) for s in (1, 2)]
    assert shown == "".join(f"{title}\n{text}\n" for title, text in zip(titles, texts, strict=True))
    alone = sample_lm.main(SampleConfig(prompt="longer: ", control=[9, 9], **common | {"seed": 2 + 3}))
    assert alone == texts[3:]


def test_serve_finishes_what_runs_when_it_is_stopped(trained):
    folder, run = trained
    command = [sys.executable, "-m", "qkvflow.serve_lm", "--run", run, "--port", "0", "--max_concurrent", "2"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while "http://" not in line:
                line = process.stderr.readline()
                assert line, "it ended before it served"
            url = line.split()[-1]
            body = {"prompt": ["a", "b", "c"], "max_tokens": 250, "stream": True, "control": [1, 0]}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                pieces = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
                reasons = [p["choices"][0]["finish_reason"] for p in pieces]
            # Two were running and one was waiting: all were promised an answer.
            assert reasons.count("length") + reasons.count("stop") == 3
            assert process.wait(30) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/models")
        finally:
            process.kill()


def test_serve_refuses_a_name_that_no_host_can_have():
    with pytest.raises(UserError, match=r"cannot listen on a\.\.b port 0"):
        serve_lm.main(ServeConfig(run="nowhere", host="a..b", port=0))


def test_sites_are_named_as_browsers_send_them():
    config = ServeConfig(run="nowhere", allowed_origins=["https://example.org/", "*"])
    assert serve_lm._access(config).origins == ["https://example.org", "*"]


def test_serve_refuses_a_port_in_use():
    """Before anything is loaded."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(UserError, match="cannot listen"):
            serve_lm.main(ServeConfig(run="nowhere", port=sock.getsockname()[1]))
