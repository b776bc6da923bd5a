"""Under load: everybody gets what they get alone, a short request waits for no long one, and nothing is left behind."""

import concurrent.futures
import contextlib
import gc
import os
import random
import statistics
import threading
import time

import httpx
import jax
import openai
import pytest
from support.serving import client_of, complete, idle, serving, wait_for

pytestmark = pytest.mark.slow
REQUESTS, DISCONNECTS, AT_ONCE = 500, 0.1, 24
POOLS = ("asyncio_", "uvloop_")  # how the threads are named in which an event loop, of either kind, runs blocking calls


@pytest.fixture(scope="module")
def loaded(writer):
    """A server with 8 slots, as by default."""
    with serving(writer, max_waiting=512, slots=8) as (url, scheduler):
        yield client_of(url), scheduler


def request(i):
    """Of many kinds: greedy and drawn, several texts, streams, log-probabilities, prompts of all lengths."""
    draw = random.Random(i)
    body = {"prompt": "word " * draw.randrange(60), "max_tokens": 1 + draw.randrange(40), "seed": i}
    body["temperature"] = draw.choice((0, 1.0, 0.7))
    body |= draw.choice(({}, {}, {"n": 2}, {"logprobs": 2}, {"stop": "e"}, {"echo": True, "logprobs": 0}))
    return body


def answer(client, i):
    told = complete(client, **request(i), stream=i % 3 == 0)
    if i % 3:
        return tuple((c.index, c.text, c.finish_reason) for c in told.choices)
    texts, reasons = {}, {}
    for piece in told:
        for c in piece.choices:
            texts[c.index] = texts.get(c.index, "") + c.text
            reasons[c.index] = c.finish_reason or reasons.get(c.index)
    return tuple((index, texts[index], reasons[index]) for index in sorted(texts))


def leave(client, i):
    """Asks for much, and goes: before the first token, in the middle of a stream, or before a whole answer."""
    body = {"prompt": "word " * (i % 60), "max_tokens": 150, "n": 1 + i % 4, "temperature": 1.0, "seed": i}
    if i % 2:
        with complete(client, **body, stream=True) as stream, contextlib.suppress(StopIteration):
            for _ in range(i % 7):
                next(stream)
    else:
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.02 * (1 + i % 5)), **body)


def resident_bytes():
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left(scheduler):
    """What there is when nobody asks for anything; threads without the event loop's pool, which grows up to a limit."""
    wait_for(lambda: idle(scheduler))
    scheduler._engine.wait()
    gc.collect()
    threads = sorted(t.name for t in threading.enumerate() if not t.name.startswith(POOLS))
    return resident_bytes(), len(jax.live_arrays()), threads


def test_500_requests_of_which_some_leave(loaded):
    client, scheduler = loaded
    draw = random.Random(0)
    leaving = {i for i in range(REQUESTS) if draw.random() < DISCONNECTS}
    assert len(leaving) > REQUESTS * DISCONNECTS / 2
    alone = {i: answer(client, i) for i in range(REQUESTS) if i not in leaving}

    def run():
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            ask = lambda i: leave(client, i) if i in leaving else answer(client, i)  # noqa: E731
            found = list(pool.map(ask, range(REQUESTS)))
        return {i: found[i] for i in alone}

    assert run() == alone
    before = left(scheduler)
    assert run() == alone
    after = left(scheduler)
    grown = (after[0] - before[0]) / 2**20
    print(f"\n{REQUESTS} requests: {grown:+.1f} MiB, arrays {before[1]} -> {after[1]}, threads {len(after[2])}")
    assert after[1] == before[1]
    assert after[2] == before[2]
    assert grown < 16
    assert scheduler.load() == {"slots": 8, "running": 0, "waiting": 0}


def test_one_large_request_starves_nobody(loaded):
    """With 128 greedy texts in flight a request for one token waits at most three times as long as alone."""
    client, scheduler = loaded

    def wait_of_one(i):
        began = time.perf_counter()
        assert complete(client, f"word {i}", max_tokens=1).usage.completion_tokens <= 1
        time.sleep(0.02)
        return time.perf_counter() - began - 0.02

    for i in range(5):
        wait_of_one(i)
    alone = statistics.median(wait_of_one(i) for i in range(30))
    large = {"model": "tiny", "prompt": "Once", "n": 128, "max_tokens": 300, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        url = str(client.base_url)
        whole = pool.submit(lambda: httpx.post(f"{url}completions", json=large, timeout=600).json())
        wait_for(lambda: scheduler.load()["running"] == 8)
        waits = [wait_of_one(i) for i in range(30)]
        assert not whole.done(), "it was to be in flight all the time"
        texts = {choice["text"] for choice in whole.result()["choices"]}
    assert len(texts) == 1, "greedy texts of one prompt are one text"
    beside = statistics.median(waits)
    print(
        f"\none token: alone {1e3 * alone:.1f} ms, beside n = 128 {1e3 * beside:.1f} ms, at most {1e3 * max(waits):.1f}"
    )
    assert beside < 3 * alone
