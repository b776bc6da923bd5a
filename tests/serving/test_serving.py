"""The server, driven by OpenAI's own client on loopback: right answers, right errors, nothing lost or leaked."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import os
import socket
import threading
import time

import haliax as hax
import httpx
import jax
import openai
import pytest
import uvicorn
from levanter.tokenizers import load_tokenizer
from support.models import is_float, small_config

import qkvflow
from qkvflow.data.tokenizers import resolve_tokenizer
from qkvflow.generation.prepare import PreparedModel
from qkvflow.generation.writer import Writer
from qkvflow.models import ControlConfig
from qkvflow.serving import Limits, Scheduler, build_app

SLOTS, LENGTH = 8, 512


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(small_config(control=ControlConfig(dim=2)), max_seq_len=LENGTH)
    # Only ASCII: bytes drawn at random are seldom text.
    model = config.build(hax.Axis("vocab", 128), key=jax.random.PRNGKey(0))
    # Ten times the usual scale: a text that varies.
    return jax.tree.map(lambda a: 10 * a if is_float(a) else a, model)


@pytest.fixture(scope="module")
def writer(model, tmp_path_factory):
    tokenizer = load_tokenizer(str(resolve_tokenizer("byte", tmp_path_factory.mktemp("tokenizer"))))
    return Writer("tiny", 0, PreparedModel(model), tokenizer, (256,))


@contextlib.contextmanager
def serving(writer, max_waiting=256, slots=SLOTS, **limits):
    """A server in a thread; gives its address and its scheduler."""
    scheduler = Scheduler(writer, slots, LENGTH, max_waiting)
    scheduler.warm_up()
    app = build_app(scheduler, "tiny", Limits(LENGTH, **limits))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", scheduler
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


def client_of(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **options)


@pytest.fixture(scope="module")
def server(writer):
    with serving(writer, max_body_bytes=2**20) as (url, scheduler):
        yield url, scheduler


@pytest.fixture(scope="module")
def client(server):
    return client_of(server[0])


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test all slots are free and nobody waits."""
    yield
    if "server" in request.fixturenames:
        wait_for(lambda: idle(request.getfixturevalue("server")[1]))


def idle(scheduler):
    return scheduler.load() == {"slots": SLOTS, "running": 0, "waiting": 0}


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def complete(client, prompt="Once", **options):
    options = {"max_tokens": 16, "temperature": 0, "model": "tiny"} | options
    return client.completions.create(prompt=prompt, **options)


def expected_text(model, writer, prompt, new):
    tokens = hax.named(writer.tokenizer.encode(prompt), ("position",))
    text = qkvflow.generate(model, tokens, new, stop_token=256).array.tolist()[len(tokens.array) :]
    text = text[: text.index(256)] if 256 in text else text
    return writer.tokenizer.decode(text)


def test_models(client):
    assert [m.id for m in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_is_what_generate_gives(client, model, writer):
    answer = complete(client, "Once upon", max_tokens=40)
    assert answer.choices[0].text == expected_text(model, writer, "Once upon", 40)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens == 9
    assert answer.usage.total_tokens == 9 + answer.usage.completion_tokens


def test_stream_is_the_completion_in_pieces(client):
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    whole = complete(client, **options)
    pieces = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    reasons = [p.choices[0].finish_reason for p in pieces if p.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert len(reasons) > 10
    assert pieces[-1].usage == whole.usage


def test_seed(client):
    def text(seed):
        return complete(client, temperature=1.0, seed=seed, max_tokens=30).choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_stop(client):
    text = complete(client, max_tokens=60).choices[0].text
    stop = text[20:22]
    answer = complete(client, max_tokens=60, stop=["never", stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == text[: text.index(stop)]


def test_several_prompts_and_samples(client):
    answer = complete(client, ["One", "Two"], n=2, temperature=1.0, seed=3, echo=True)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text[:3] for c in answer.choices] == ["One", "One", "Two", "Two"]
    alone = complete(client, "Two", temperature=1.0, seed=3 + 2, echo=True)
    assert alone.choices[0].text == answer.choices[2].text


def test_tokens_as_prompt(client, writer):
    text = complete(client, "Once").choices[0].text
    assert complete(client, writer.tokenizer.encode("Once")).choices[0].text == text


def test_control(client):
    texts = [complete(client, extra_body={"control": c}).choices[0].text for c in ([0, 0], [9.0, -9.0])]
    assert texts[0] == complete(client).choices[0].text
    assert texts[0] != texts[1]


BAD = [
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": LENGTH}, 400, "maximum context length is 512"),
    ({"prompt": "x" * LENGTH}, 400, "maximum context length is 512"),
    ({"model": "other"}, 404, "`other` does not exist"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "`n`"),
    ({"n": 1000}, 400, "at most 128"),
    ({"stop": ""}, 400, "stop"),
    ({"logprobs": 2}, 400, "logprobs"),
    ({"presence_penalty": 1}, 400, "presence_penalty"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [1, 257]}, 400, "from 0 to 256"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"extra_body": {"top_k": 0}}, 400, "top_k"),
    ({"extra_body": {"control": [1]}}, 400, "control"),
    ({"extra_body": {"control": "up"}}, 400, "control"),
    ({"extra_body": {"nonsense": 1}}, 400, "nonsense"),
]


@pytest.mark.parametrize(("options", "status", "message"), BAD, ids=str)
def test_bad_requests(client, options, status, message):
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        complete(client, **options)
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": ',
        b"[1]",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b'{"max_tokens": 1e999}',
        b'{"temperature": 1' + b"0" * 400 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=lambda body: body[:20],
)
def test_bodies_that_are_no_request(server, body):
    answer = httpx.post(f"{server[0]}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_paths_and_methods(server):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/health", 200)):
        answer = httpx.request(method, server[0] + path)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["type"] == "invalid_request_error"


def test_ten_megabytes(client):
    """Refused by its size, without being read as text; and the client hears it."""
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError, match="bytes") as caught:
        complete(client, "x" * 10_000_000)
    assert caught.value.status_code == 413
    assert time.monotonic() - began < 10
    assert complete(client).choices[0].text


def test_fifty_at_once_are_the_same_as_alone(server, client):
    """Eight at a time, of different lengths and seeds: each gets what it gets alone, though they share a batch."""

    def ask(i):
        text = complete(client, "word " * (1 + i % 13), max_tokens=3 + 7 * (i % 9), temperature=1.0, seed=i)
        return text.choices[0].text

    alone = [ask(i) for i in range(0, 50, 7)]
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        together = list(pool.map(ask, range(50)))
    assert together[::7] == alone


def test_a_client_that_leaves(server, client):
    """Mid-stream, and waiting for a whole answer: the slots are free at once, and others are not disturbed."""
    url, scheduler = server
    expected = complete(client, max_tokens=100).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        streams = [complete(client, max_tokens=500, stream=True) for _ in range(3)]
        for stream in streams:
            next(iter(stream))
        other = pool.submit(complete, client, max_tokens=100)
        for stream in streams:
            stream.close()
        assert other.result().choices[0].text == expected
    wait_for(lambda: idle(scheduler), seconds=5)
    request = {"prompt": ["a"] * 100, "max_tokens": 500, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=request, timeout=0.3)
    wait_for(lambda: idle(scheduler), seconds=5)


@pytest.mark.slow
def test_time_out_and_overload(writer):
    with serving(writer, max_waiting=2, slots=1, request_timeout=0.5) as (url, scheduler):
        client, decode = client_of(url), scheduler._engine.decode
        scheduler._engine.decode = lambda steps: (time.sleep(0.005), decode(steps))[1]
        with pytest.raises(openai.APIStatusError, match="longer than") as caught:
            complete(client, ["a"], max_tokens=500, n=2)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIStatusError, match="Too many") as caught:
            complete(client, n=3)
        assert caught.value.status_code == 503
        error = None
        for line in httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 500, "n": 2, "stream": True}
        ).iter_lines():
            if line.startswith("data: {"):
                error = json.loads(line[6:]).get("error")
        assert error["code"] == "timeout"
        wait_for(lambda: scheduler.load()["running"] == 0)
        assert complete(client, max_tokens=2).choices[0].finish_reason == "length"


def test_a_failing_step_takes_nobody_down(server, client, monkeypatch):
    scheduler = server[1]
    text = complete(client).choices[0].text
    engine = scheduler._engine
    monkeypatch.setattr(engine, "decode", lambda steps: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="failed"):
        complete(client)
    assert complete(client).choices[0].text == text


@pytest.mark.slow
def test_500_requests_leak_nothing(server, client):
    """Completions, streams, streams left half-way and errors; memory of the process before and after."""

    def ask(i):
        kind = i % 4
        if kind == 0:
            complete(client, "word " * (i % 40), max_tokens=1 + i % 30)
        elif kind == 1:
            list(complete(client, max_tokens=20, stream=True, n=2))
        elif kind == 2:
            stream = complete(client, max_tokens=400, stream=True)
            next(iter(stream))
            stream.close()
        else:
            with pytest.raises(openai.BadRequestError):
                complete(client, max_tokens=-1)

    def run(count):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, range(count)))
        wait_for(lambda: idle(server[1]))
        gc.collect()
        return resident_bytes(), len(jax.live_arrays())

    run(200)
    (before, arrays_before), (after, arrays_after) = run(200), run(500)
    assert arrays_after == arrays_before
    assert after - before < 8 * 2**20, f"{(after - before) / 2**20:.1f} MiB more after 500 requests"


def resident_bytes():
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
