"""The server, driven by OpenAI's own client on loopback: right answers, right errors, nothing lost or leaked."""

import asyncio
import concurrent.futures
import gc
import json
import os
import time

import haliax as hax
import httpx
import jax
import openai
import pytest
from fastapi.responses import JSONResponse
from support.serving import END, client_of, complete, idle, serving, wait_for

import qkvflow
from qkvflow.generation.engine import Text
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.serving import app
from qkvflow.serving.job import Event, Job


def expected_text(model, writer, prompt, new):
    tokens = hax.named(writer.tokenizer.encode(prompt), ("position",))
    text = qkvflow.generate(model, tokens, new, stop_token=END).array.tolist()[len(tokens.array) :]
    text = text[: text.index(END)] if END in text else text
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


def test_answers_about_tokens_are_written_in_a_thread(server, monkeypatch):
    """Of a long text they are long: the event loop, which all requests share, does not wait for them."""
    in_loop = []

    class Noticed(JSONResponse):
        def render(self, content):
            in_loop.append(asyncio._get_running_loop() is not None)
            return super().render(content)

    monkeypatch.setattr(app, "JSONResponse", Noticed)
    found = httpx.post(f"{server[0]}/tokenize", json={"prompt": "Once"}).json()
    assert (found["count"], found["tokens"]) == (4, [*b"Once"])
    assert httpx.post(f"{server[0]}/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Once"}
    assert in_loop == [False, False]


def test_control(client):
    texts = [complete(client, extra_body={"control": c}).choices[0].text for c in ([0, 0], [9.0, -9.0])]
    assert texts[0] == complete(client).choices[0].text
    assert texts[0] != texts[1]


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
    answer = httpx.post(f"{server[0]}/v1/completions", content=body, headers={"Content-Type": "application/json"})
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


def test_texts_that_begin_together_do_so_one_by_one(server, client, monkeypatch):
    """Else whoever waits for a token would wait for all of them."""
    scheduler, begun, turns = server[1], [], []
    turn, begin = scheduler._turn, scheduler._engine.begin
    monkeypatch.setattr(scheduler._engine, "begin", lambda *args: begun.append(1) or begin(*args))

    def counted():
        before = len(begun)
        turn()
        turns.append(len(begun) - before)

    monkeypatch.setattr(scheduler, "_turn", counted)
    complete(client, "The prompt", n=9, max_tokens=5, temperature=0)
    assert (len(begun), max(turns)) == (9, 1)


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
        wait_for(lambda: scheduler.load()["running"] == 0)
        stream = complete(client, max_tokens=500, stream=True)
        next(iter(stream))
        with pytest.raises(openai.APIStatusError, match="Too many") as caught:
            complete(client, n=3)  # as many as the server keeps, but one of the places is taken
        assert caught.value.status_code == 503
        stream.close()
        wait_for(lambda: scheduler.load()["running"] == 0)
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


def test_texts_that_wait_outlive_a_failing_step(writer, client, monkeypatch):
    text = complete(client).choices[0].text
    with serving(writer, slots=1) as (url, scheduler), concurrent.futures.ThreadPoolExecutor(2) as pool:
        own = client_of(url)

        def fail(steps):
            wait_for(lambda: scheduler.load()["waiting"] == 1)
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(scheduler._engine, "decode", fail)
        first = pool.submit(complete, own)
        wait_for(lambda: scheduler.load()["running"] == 1)
        second = pool.submit(complete, own)
        with pytest.raises(openai.InternalServerError, match="failed"):
            first.result()
        assert second.result().choices[0].text == text
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("where", ["take", "park"])
def test_a_text_that_is_leaving_its_slot_ends_with_a_failing_step(writer, client, monkeypatch, where):
    """It went on behind its first tokens as if it were new."""
    text = complete(client).choices[0].text
    with serving(writer, slots=2) as (url, scheduler):

        def fail(*args):
            monkeypatch.undo()
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(*((scheduler._engine, "take") if where == "take" else (Text, "park")), fail)
        told: list[list[Event]] = [[], [], []]
        bias = {END: -1000.0}
        jobs = [Job([65], 400, SamplingOptions(0.0, bias=bias), (), None, events.append) for events in told]
        scheduler.submit(jobs[:2])
        wait_for(lambda: told[0] and told[1])
        scheduler.submit(jobs[2:])
        wait_for(lambda: idle(scheduler))
        assert [[e.reason for e in events if e.reason] for events in told] == [["error"]] * 3
        assert complete(client_of(url)).choices[0].text == text


def test_a_server_that_cannot_go_on_says_so(writer, monkeypatch):
    """Instead of letting every request wait for its timeout."""
    with serving(writer) as (url, scheduler):
        monkeypatch.setattr(scheduler._engine, "decode", lambda steps: 1 / 0)
        monkeypatch.setattr(scheduler, "_new_engine", lambda slots: [][slots])
        with pytest.raises(openai.InternalServerError, match="failed"):
            complete(client_of(url))
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.get(f"{url}/health").json()["status"] == "broken"
        with pytest.raises(openai.InternalServerError, match="Restart it") as error:
            complete(client_of(url))
        assert error.value.status_code == 503
        assert error.value.code == "broken"


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


def test_an_event_is_one_line_whatever_the_text(server):
    """U+2028 ends a line for Python's `splitlines`, on which clients rely."""
    body = {"prompt": "a\u2028b\x85c", "echo": True, "max_tokens": 1, "stream": True}
    with httpx.stream("POST", server[0] + "/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]).startswith("a\u2028b\x85c")
